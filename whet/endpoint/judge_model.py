"""A model that judges: it answers requests of OpenAI's chat API with an engine. A reply is a function of the weights
and the request, and not a part of any episode."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from typing import cast

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.core.content import text_of
from whet.core.types import Distribution, Message
from whet.endpoint.request import ApiError, openai_error
from whet.engines.base import Completion, Engine, SamplingParams, check_completion
from whet.tasks.judges.config import adapter_of


class JudgeMessage(BaseModel):
    """A message of a question, of any role that the chat template has."""

    role: str
    content: str


class JudgeRequest(BaseModel):
    """The part of OpenAI's chat requests that judges are asked with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    """``policy``, or ``policy:NAME`` for the policy's model under another adapter."""
    messages: list[JudgeMessage] = Field(min_length=1)
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(gt=0)
    seed: int
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    among: list[str] = []
    """With words, ``top_logprobs`` has all tokens that are one of them, however unlikely. Not in OpenAI's API."""


class JudgeModel:
    """Answers with an engine, and a renderer of its model's texts."""

    def __init__(self, generator: Engine[object], renderer: Renderer, longest: int) -> None:
        """``longest``: the most tokens of a question and its verdict."""
        self.generator, self.renderer, self.longest = generator, renderer, longest

    async def answer(self, body: str) -> tuple[int, str]:
        """Return the HTTP status and the JSON of the answer to a request."""
        try:
            request = JudgeRequest.model_validate_json(body)
            prompt = self._prompt([cast(Message, message.model_dump()) for message in request.messages])
        except ValidationError as error:
            return _refused(ApiError(400, str(error)))
        except ApiError as error:
            return _refused(error)
        among = [token for word in dict.fromkeys(request.among) for token in self._tokens.get(word, ())]
        params = SamplingParams(
            request.max_tokens, request.seed, Distribution(temperature=request.temperature or 1.0),
            greedy=request.temperature == 0, stop_token_ids=tuple(self.renderer.stop_token_ids),
            adapter=adapter_of(request.model),
        )  # fmt: skip
        if request.logprobs:
            params = replace(params, distribution=Distribution(), likeliest=request.top_logprobs, among=tuple(among))
        sampled = await self.generator.sample(prompt, params, "judge")
        completion = check_completion(sampled, prompt, params, self.generator)
        if completion.finish_reason == "aborted":
            return _refused(ApiError(503, "the engine is closed"))
        reply = self.renderer.parse_reply(completion.tokens)
        choice: JsonObject = {
            "index": 0,
            "message": {"role": "assistant", "content": text_of(reply["content"])},
            "finish_reason": completion.finish_reason,
        }
        if request.logprobs:
            choice["logprobs"] = {"content": self._logprobs(completion)}
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

    def _logprobs(self, completion: Completion) -> list[dict[str, object]]:
        """Return the log-probs of the tokens in OpenAI's format."""
        ranked = completion.likeliest or [{}] * len(completion.tokens)
        return [
            self._scored(token, logprob)
            | {"top_logprobs": [self._scored(*each) for each in sorted(likeliest.items(), key=lambda each: -each[1])]}
            for token, logprob, likeliest in zip(completion.tokens, completion.logprobs, ranked, strict=True)
        ]

    @cached_property
    def _tokens(self) -> dict[str, list[int]]:
        """The tokens of each text, without the white space around it."""
        tokens = defaultdict[str, list[int]](list)
        for token in range(len(self.renderer.tokenizer)):
            tokens[self.renderer.text_of(token).strip()].append(token)
        return tokens

    def _scored(self, token: int, logprob: float) -> JsonObject:
        return {"token": self.renderer.text_of(token), "logprob": logprob}


def _refused(error: ApiError) -> tuple[int, str]:
    return error.status, json.dumps(openai_error(error))
