"""SGLang's HTTP interface: ``/generate`` with token ids and log-probs, ``/update_weights_from_disk``."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError, GeneratorError, RefitError
from whet.base.strict_json import JsonObject
from whet.engines.base import HandedOut, SamplingParams
from whet.engines.server.client import Client, RefusedError, Sampled, Scored

log = logging.getLogger(__name__)


class _Stream:
    """Receives the events of one completion and puts them together as the whole answer. An event has all tokens so far,
    or, if the server was started with ``--incremental-streaming-output``, the new ones."""

    def __init__(self, sampled: Callable[[list[int]], None]) -> None:
        self._sampled = sampled
        self._rows: list[Any] = []
        self.answer: JsonObject = {}

    def receive(self, event: JsonObject) -> None:
        facts = event["meta_info"]
        rows = facts["output_token_logprobs"]
        first = int(facts["completion_tokens"]) - len(rows)  # the place of its first token in the completion
        new = rows[len(self._rows) - first :]
        self._rows += new
        self.answer = event | {"meta_info": facts | {"output_token_logprobs": self._rows}}
        self._sampled([int(token) for _, token, *_ in new])


class SglangApi:
    """See ``Api``."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client, self._model = client, model

    async def find(self, context: int | None, setting: str) -> None:
        await self._found(context, setting)

    async def _found(self, context: int | None, setting: str) -> JsonObject:
        """Return the facts that the server tells."""
        url = self._client.url
        try:
            facts: JsonObject = await self._client.get("/get_server_info")
            named = {facts.get("served_model_name"), facts.get("model_path")}
        except (RefusedError, AttributeError, TypeError) as error:
            raise ConfigError(f"{url} is not a server of SGLang: {error}") from None
        if self._model is not None and self._model not in named:
            raise ConfigError(
                f"{url} serves {facts.get('model_path')}, not {self._client.section}.model = {self._model}"
            )
        longest = facts.get("context_length")
        if longest is not None and context is not None and longest < context:
            raise ConfigError(
                f"{url} takes at most {longest} tokens of prompt and completion, fewer than {setting} = "
                f"{context}; lower that, or start the server with --context-length {context}"
            )
        return facts

    async def check(self, vocabulary: int, context: int) -> None:
        url = self._client.url
        facts = await self._found(context, "generator.max_context")
        try:
            await self.weights()
        except (RefusedError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} is not an SGLang server that tells the version of its weights: {error}") from None
        if not facts.get("enable_deterministic_inference"):
            log.warning(
                "%s ignores seeds, so samples can't be repeated; --enable-deterministic-inference changes that", url
            )
        await self._client.post("/continue_generation")  # a run that was killed may have left it paused
        try:
            await self.generate([vocabulary - 1], SamplingParams(1), 1, None)
        except RefusedError as error:
            raise ConfigError(
                f"{url} refuses a prompt with the last of the {vocabulary} tokens of model.path, so it serves another "
                f"model: {error}"
            ) from None

    async def tokenize(self, text: str) -> list[int] | None:
        try:
            answer = await self._client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        except RefusedError:  # an older version
            return None
        return list(answer["tokens"])

    async def score(self, tokens: list[int], start: int, k: int) -> list[Scored]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first entry is always empty
            "top_logprobs_num": k,
        }
        answer = await self._client.sample("/generate", body)
        try:
            facts = answer["meta_info"]
            logprobs = [float(logprob) for logprob, *_ in facts["input_token_logprobs"][1:]]
            scored = [int(token) for _, token, *_ in facts["input_token_logprobs"][1:]]
            if scored != tokens[start:]:
                raise ValueError(f"they are of the tokens {scored[:8]}, not {tokens[start:][:8]}")
            best = facts["input_top_logprobs"][1:] if k else [[]] * len(logprobs)
            tops = [[(int(token), float(value)) for value, token, *_ in each] for each in best]
            rows = [Scored(logprob, top) for _, logprob, top in zip(tokens[start:], logprobs, tops, strict=True)]
        except (LookupError, TypeError, ValueError) as error:
            raise GeneratorError(
                f"{self._client.url} gave no log-probs of a prompt's tokens ({type(error).__name__}: {error})"
            ) from None
        return rows

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        salt: str | None,
        sampled: Callable[[list[int]], None] | None = None,
    ) -> Sampled:
        settings: JsonObject = {
            "temperature": 0.0 if params.greedy else params.distribution.temperature,
            "sampling_seed": params.seed % 2**31,
            "max_new_tokens": limit,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "no_stop_trim": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        body: JsonObject = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
        if params.images:
            body |= {"image_data": list(params.images), "return_prompt_token_ids": True}
        try:
            answer = await self._answer(body, sampled)
            facts = answer["meta_info"]
            logprobs, tokens = [], []
            for logprob, token, *_ in facts["output_token_logprobs"]:
                logprobs.append(float(logprob))
                tokens.append(int(token))
            kind, label = facts["finish_reason"]["type"], str(facts["weight_version"])
            cached = int(facts.get("cached_tokens") or 0)
            read = [int(token) for token in answer["prompt_token_ids"]] if params.images else None
        except (LookupError, TypeError, ValueError) as error:
            raise GeneratorError(
                f"{self._client.url} gave a completion without tokens, log-probs or the version of its weights "
                f"({type(error).__name__}: {error}); a newer version of SGLang is needed"
            ) from None
        return Sampled(tokens, logprobs, "aborted" if kind == "abort" else kind, ("", label), cached, read)

    async def _answer(self, body: JsonObject, sampled: Callable[[list[int]], None] | None) -> Any:
        """Return the answer to a request of tokens, as it comes whole or by events."""
        stream = _Stream(lambda _: None)
        if sampled is None:
            return await self._client.sample("/generate", body)
        handed_out = HandedOut(sampled)

        def begin() -> Callable[[Any], None]:
            nonlocal stream
            stream = _Stream(handed_out.from_the_first())
            return stream.receive

        return await self._client.follow("/generate", body | {"stream": True}, begin) or stream.answer

    async def pause(self, keep: bool) -> None:
        await self._client.post("/pause_generation", {"mode": "retract"})

    async def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        answer = await self._client.post("/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise RefitError(f"{self._client.url} did not load the weights: {answer!r:.300}")

    async def rename(self, label: str) -> None:
        await self._client.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def weights(self) -> str:
        return str((await self._client.get("/get_model_info"))["weight_version"])

    async def resume(self, clear: bool) -> None:
        if clear:
            await self._client.post("/flush_cache")
        await self._client.post("/continue_generation")
