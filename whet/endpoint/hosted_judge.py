"""A judge's model in its process, which ``whet.tasks.judges.hosted`` starts without torch: a frozen model on the
built-in engine that answers requests of OpenAI's chat API. A reply is a function of the model and the request, to the
bit."""

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any, cast

import torch
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whet.base.errors import DataError
from whet.base.lazy import torch_dtype
from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.core.content import text_of
from whet.core.types import Distribution, Message
from whet.endpoint.request import ApiError, openai_error
from whet.engines.base import Completion, SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.models.config import ModelConfig
from whet.models.loading import load_model, load_model_config, load_tokenizer
from whet.models.precision import choose_precision

_STALL_S = 3600.0  # seconds; the owner has a deadline for each request


class JudgeMessage(BaseModel):
    """A message of a question, of any role that the chat template has."""

    role: str
    content: str


class JudgeRequest(BaseModel):
    """The part of OpenAI's chat requests that judges are asked with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[JudgeMessage] = Field(min_length=1)
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(gt=0)
    seed: int
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    among: list[str] = []
    """With words, ``top_logprobs`` has all tokens that are one of them, however unlikely. Not in OpenAI's API."""


class HostedJudge:
    """The model of a judge, as a ``Served``."""

    def __init__(
        self, model: str, revision: str | None, dtype: str, threads: int, max_context: int, max_batch: int
    ) -> None:
        """Raises ``WhetError`` for a model that can't be loaded, or has no chat template."""
        torch.set_num_threads(threads)
        config = ModelConfig(path=model, revision=revision)
        if dtype == "auto":
            dtype = choose_precision(load_model_config(config), "cpu").precision
        self.dtype = dtype
        tokenizer = load_tokenizer(config)
        self.renderer = Renderer(tokenizer)
        loaded = cast(Any, load_model(config, dtype=torch.float32, train=False))
        text = loaded.config.get_text_config()
        longest: int | None = getattr(text, "max_position_embeddings", None)
        self._logits: int = text.vocab_size
        self.longest = min(max_context, longest or max_context)
        settings = TorchGeneratorConfig(
            dtype=cast(Any, dtype), max_context=self.longest, max_batch=max_batch, threads=threads, deadline=_STALL_S,
            packed_weights=False,
        )  # fmt: skip
        engine = build_engine_model(loaded.config, loaded.state_dict(), torch_dtype(dtype))
        self.generator = TorchGenerator(settings, engine, tokenizer)

    async def computes_in(self) -> str:
        """Return the dtype of the computations."""
        return self.dtype

    async def answer(self, body: str) -> tuple[int, str]:
        """Return the HTTP status and the JSON of the answer to a request."""
        try:
            request = JudgeRequest.model_validate_json(body)
            prompt = self._prompt([cast(Message, message.model_dump()) for message in request.messages])
        except ValidationError as error:
            return _refused(ApiError(400, str(error)))
        except ApiError as error:
            return _refused(error)
        params = SamplingParams(
            request.max_tokens, request.seed, Distribution(temperature=request.temperature or 1.0),
            greedy=request.temperature == 0, stop_token_ids=tuple(self.renderer.stop_token_ids),
            likeliest=(self._logits if request.among else request.top_logprobs) if request.logprobs else 0,
        )  # fmt: skip
        completion = await self.generator.sample(prompt, params)
        reply = self.renderer.parse_reply(completion.tokens)
        choice: JsonObject = {
            "index": 0,
            "message": {"role": "assistant", "content": text_of(reply["content"])},
            "finish_reason": completion.finish_reason,
        }
        if request.logprobs:
            choice["logprobs"] = {"content": self._logprobs(completion, request.among)}
        return 200, json.dumps({"object": "chat.completion", "model": request.model, "choices": [choice]})

    def _prompt(self, messages: list[Message]) -> list[int]:
        if not self.renderer.longer_than(self.longest, messages):
            try:
                prompt = self.renderer.render_prompt(messages)
            except (DataError, TemplateError, ValueError, KeyError, TypeError) as error:
                raise ApiError(400, f"the chat template can't render the messages: {error}") from None
            if len(prompt) < self.longest:
                return prompt
        raise ApiError(400, f"the messages have more than {self.longest - 1} tokens", code="context_length_exceeded")

    def _logprobs(self, completion: Completion, among: Collection[str]) -> list[dict[str, object]]:
        """Return the log-probs of the tokens in OpenAI's format."""
        ranked = completion.likeliest or [{}] * len(completion.tokens)
        if among:
            words = {token for token, text in enumerate(self._texts) if text.strip() in among}
            ranked = [{token: value for token, value in each.items() if token in words} for each in ranked]
        return [
            self._scored(token, logprob)
            | {"top_logprobs": [self._scored(other, value) for other, value in likeliest.items()]}
            for token, logprob, likeliest in zip(completion.tokens, completion.logprobs, ranked, strict=True)
        ]

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token."""
        return [self.renderer.decode([token]) for token in range(len(self.renderer.tokenizer))]

    def _scored(self, token: int, logprob: float) -> JsonObject:
        return {"token": self.renderer.decode([token]), "logprob": logprob}

    async def responds(self) -> None:
        """See ``Served``."""

    async def blocked_at(self) -> str | None:
        return None


def _refused(error: ApiError) -> tuple[int, str]:
    return error.status, json.dumps(openai_error(error))
