"""vLLM's HTTP interface, as in version 0.32: tokens in and out by ``/inference/v1/generate``, weights by its
interface for development (``VLLM_SERVER_DEV_MODE=1``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError, GeneratorError
from whet.base.strict_json import JsonObject
from whet.core.types import Distribution
from whet.engines.base import HandedOut, SamplingParams
from whet.engines.server.client import Client, RefusedError, Sampled, Scored

_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve ... --enable-scale-out --logprobs-mode processed_logprobs "
    "--enable-prompt-tokens-details --generation-config vllm"
)


class _Stream:
    """Receives the events of one completion, which hold new tokens, and puts them together as the whole answer."""

    def __init__(self, sampled: Callable[[list[int]], None]) -> None:
        self._sampled = sampled
        self._content: list[Any] = []
        self._choice: JsonObject = {"token_ids": [], "logprobs": {"content": self._content}}
        self.answer: JsonObject = {"choices": [self._choice]}

    def receive(self, event: JsonObject) -> None:
        if event.get("usage"):  # of the last event, which has no tokens
            self.answer["usage"] = event["usage"]
        if event.get("prompt_token_ids"):  # of the first event, for a prompt with images
            self.answer["prompt_token_ids"] = event["prompt_token_ids"]
        for part in event["choices"]:
            tokens = list(part["token_ids"] or ())
            if tokens:
                self._choice["token_ids"] += tokens
                self._content += part["logprobs"]["content"]
                self._sampled(tokens)
            self._choice |= {name: part.get(name) for name in ("finish_reason", "weight_versions")}


class VllmApi:
    """See ``Api``."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client, self._model = client, model

    async def find(self, context: int | None, setting: str) -> None:
        url = self._client.url
        answer = await self._client.get("/v1/models")
        try:
            served = {str(each["id"]): each for each in answer["data"]}
        except (LookupError, TypeError):
            raise ConfigError(f"{url} does not list its models at /v1/models; it is not a server of vLLM") from None
        if self._model is None and len(served) == 1:
            (self._model,) = served
        if self._model is None or self._model not in served:
            raise ConfigError(
                f"{url} serves {', '.join(served) or 'no model'}; set {self._client.section}.model to one of these"
            )
        longest = served[self._model].get("max_model_len")
        if isinstance(longest, int) and context is not None and longest < context:
            raise ConfigError(
                f"{url} takes at most {longest} tokens of prompt and completion, fewer than {setting} = "
                f"{context}; lower that, or start the server with --max-model-len {context}"
            )

    async def check(self, vocabulary: int, context: int) -> None:
        url = self._client.url
        await self.find(context, "generator.max_context")
        if await self._client.status("/weight_info") != 200:
            raise ConfigError(f"{url} takes no new weights: /weight_info is missing; {_START}")
        await self.weights()
        await self._client.post("/resume")  # a run that was killed may have left it paused
        only = SamplingParams(1, distribution=Distribution(temperature=0.5, top_k=1))
        try:  # with two tokens: on CPUs vLLM ends with an error where linear attention meets a prompt of one
            first = await self.generate([vocabulary - 1] * 2, only, 1, None)
        except RefusedError as error:
            raise ConfigError(
                f"{url} refuses a prompt with the last of the {vocabulary} tokens of model.path, so it serves another "
                f"model, or it takes no tokens ({_START}): {error}"
            ) from None
        if len(first.tokens) != 1:
            raise ConfigError(f"{url} sampled {len(first.tokens)} tokens where it was asked for 1; {_START}")
        if not abs(first.logprobs[0]) < 1e-3:
            raise ConfigError(
                f"{url} reports log-probs without temperature and filters, or logits: a token that was the only "
                f"candidate has {first.logprobs[0]:.3g} instead of 0; {_START}"
            )

    async def tokenize(self, text: str) -> list[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def score(self, tokens: list[int], start: int, k: int) -> list[Scored]:
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": k}
        answer = await self._client.sample("/v1/completions", body)
        try:
            entries: list[Any] = answer["choices"][0]["prompt_logprobs"]
            rows = [_scored(each, token, k) for token, each in zip(tokens[start:], entries[start:], strict=True)]
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
        d = params.distribution
        filters = {} if params.greedy else {"top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p}
        settings: JsonObject = {
            "temperature": 0.0 if params.greedy else d.temperature,
            "seed": params.seed % 2**63,
            "max_tokens": limit,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "detokenize": bool(params.stop),
            "skip_special_tokens": False,
            "logprobs": 0,  # only for the sampled token
            **filters,
        }
        body: JsonObject = {"model": self._model, "token_ids": prompt, "sampling_params": settings}
        if salt is not None:
            body["cache_salt"] = salt
        if params.images:
            parts = [{"type": "image_url", "url": url} for url in params.images]
            body |= {"content_parts": parts, "return_token_ids": True}
        try:
            answer = await self._answer(body, sampled)
            choice = answer["choices"][0]
            tokens = list(choice["token_ids"] or ())
            logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]] if tokens else []
            spans = [str(span["version"]) for span in choice["weight_versions"] or ()]
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = int(details.get("cached_tokens") or 0)
            finish = {"abort": "aborted"}.get(choice["finish_reason"], choice["finish_reason"])
            read = [int(token) for token in answer["prompt_token_ids"]] if params.images else None
        except (LookupError, TypeError, ValueError) as error:
            raise GeneratorError(
                f"{self._client.url} gave a completion without tokens, log-probs or the version of its weights "
                f"({type(error).__name__}: {error}); {_START}"
            ) from None
        return Sampled(tokens, logprobs, finish, (spans[0], spans[-1]) if spans else ("", ""), cached, read)

    async def _answer(self, body: JsonObject, sampled: Callable[[list[int]], None] | None) -> Any:
        """Return the answer to a request of tokens, as it comes whole or by events."""
        path, stream = "/inference/v1/generate", _Stream(lambda _: None)
        if sampled is None:
            return await self._client.sample(path, body)
        handed_out = HandedOut(sampled)

        def begin() -> Callable[[Any], None]:
            nonlocal stream
            stream = _Stream(handed_out.from_the_first())
            return stream.receive

        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        return await self._client.follow(path, asked, begin) or stream.answer

    async def pause(self, keep: bool) -> None:
        await self._client.post("/pause?mode=keep")

    async def load(self, folder: Path, label: str) -> None:
        await self._client.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )
        await self._client.post("/reset_encoder_cache")  # features of images that older weights have computed
        await self.rename(label)

    async def rename(self, label: str) -> None:
        await self._client.post("/update_weight_version", {"new_version": label})

    async def weights(self) -> str:
        try:
            return str((await self._client.get("/weight_info"))["weight_version"])
        except (LookupError, TypeError):
            raise GeneratorError(f"{self._client.url} does not tell the version of its weights; {_START}") from None

    async def resume(self, clear: bool) -> None:
        if clear:
            answer = await self._client.post("/reset_prefix_cache?reset_running_requests=true")
            if not (isinstance(answer, dict) and answer.get("success")):
                raise GeneratorError(f"{self._client.url} did not clear the KV cache of older weights")
        await self._client.post("/resume")


def _scored(entries: dict[str, JsonObject], token: int, k: int) -> Scored:
    """Read one position: the ``k`` most likely tokens, and the prompt's token if it is not among them."""
    ranked = sorted(entries.items(), key=lambda entry: int(entry[1]["rank"]))[:k]
    return Scored(float(entries[str(token)]["logprob"]), [(int(name), float(each["logprob"])) for name, each in ranked])
