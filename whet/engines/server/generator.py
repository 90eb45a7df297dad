"""The generator on servers that are already running: one engine for each server, behind the router.

    Router -> ServerGenerator ==HTTP==> a server of vLLM or SGLang
                    |                         ^ load
                    +-- WeightFolder ==files==+

Who waits for whom: the first pause looks at the server; ``sample`` awaits its answer as long as the server answers
anything within ``generator.deadline``. A server that gives no answer, or answers with weights that this run did not
publish (it was restarted), is lost: the router sends its requests to others. The engine that replaces it waits for the
server to return, and samples after the next refit.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whet.base.errors import ConfigError, GeneratorError, RefitError, WhetError
from whet.base.lazy import torch_dtype
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.server.client import Api, Client, RefusedError, Sampled, check_tokenizer
from whet.engines.server.config import RemoteConfig
from whet.engines.server.folder import WeightFolder
from whet.engines.server.sglang_api import SglangApi
from whet.engines.server.vllm_api import VllmApi
from whet.engines.watchdog import Watchdog
from whet.fetch.images import opaque
from whet.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.models.image_processor import ImageProcessor

_RETURNS = 2.0  # seconds between two looks at a lost server
_CLOSING = 5.0


class ServerGenerator:
    """A ``PausableEngine``. ``run`` names the run, whose weights are labelled ``run-version`` on the server. With
    ``returns`` the first pause waits until the server answers. All calls must come from one event loop."""

    def __init__(
        self,
        config: RemoteConfig,
        url: str,
        model_config: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None",
        folder: WeightFolder,
        run: str,
        returns: bool = False,
        images: "ImageProcessor | None" = None,
    ) -> None:
        self.config, self.url, self.tokenizer, self.folder = config, url, tokenizer, folder
        self.images = images
        self.version = 0
        self.weights_complete = False
        self._run, self._returns = run, returns
        self._vocab = int(model_config.get_text_config().vocab_size)
        self._api: Api | None = None
        self._client: Client | None = None
        self._starting = asyncio.Lock()
        self._settled = asyncio.Event()  # set while no refit is in progress
        self._settled.set()
        self._closed = False
        self._next = 0  # the version of the refit in progress
        self._loaded = -1  # the version that the server loaded last
        self._watchdog = Watchdog(config.deadline)  # an answer is progress
        self._in_flight = set[asyncio.Task[Sampled]]()
        self._metrics = Metrics()

    @property
    def dtype(self) -> "torch.dtype":
        return torch_dtype(self.config.dtype)

    @property
    def ranks(self) -> int:
        """The processes that read the learner's buckets: this one, if the engine writes the folder."""
        return int(self.folder.writer is self)

    def tally(self) -> Metrics:
        """See ``Engine``."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    # Sampling

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """Continue ``prompt``. A prompt that fills the context gives no token and finish reason ``length``.

        Raises ``WhetError`` for invalid parameters, ``DeadlineError`` if the server makes no progress and
        ``GeneratorError`` if it is gone or has other weights.
        """
        return await self._sample(prompt, params, None)

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """See ``StreamingEngine``: as many tokens at a time as the server sends."""

        def receive(tokens: list[int]) -> None:
            self._watchdog.reset()
            sampled(tokens)

        return await self._sample(prompt, params, receive)

    async def _sample(
        self, prompt: list[int], params: SamplingParams, sampled: Callable[[list[int]], None] | None
    ) -> Completion:
        await self._settled.wait()
        self._check(prompt, params)
        limit = min(params.max_new_tokens, self.config.max_context - len(prompt))
        if limit <= 0:
            return Completion([], [], (self.version, self.version), "length")
        api, oldest = await self._started(), self.version
        salt = self._label(self.version) if self.config.on_refit == "keep" else None
        if not self._in_flight:
            self._watchdog.reset()  # an idle server has no answers
        sent, with_sent = prompt, params
        if params.images:
            sent, with_sent = await asyncio.to_thread(self._marked, prompt, params)
        task = asyncio.ensure_future(api.generate(sent, with_sent, limit, salt, sampled))
        self._in_flight.add(task)
        try:
            await self._watchdog.wait(task, f"the server {self.url} has given no answer")
            if task.cancelled() and self._closed:
                return Completion([], [], (oldest, self.version), "aborted")
            return self._completion(prompt, params, oldest, task.result())
        finally:
            self._in_flight.discard(task)
            task.cancel()  # if the caller is cancelled: the server drops the request

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if self._closed:
            raise GeneratorError("the generator is closed")
        if not self.weights_complete:
            raise RefitError(f"the server {self.url} has no weights of this run; publish them first")
        check_request(prompt, params, self._vocab, stops=self.tokenizer is not None)
        if (reason := self.config.cannot_sample(params.distribution)) is not None and not params.greedy:
            raise WhetError(reason)
        if params.images and self.images is None:
            raise WhetError("the prompt has images, and the model reads none; set model.vision=frozen or trained")

    def _marked(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Return a prompt with one mark for each image, and its images in their order."""
        assert self.images is not None
        tokens, urls = self.images.folded(prompt, params.images)
        return tokens, replace(params, images=tuple(map(opaque, urls)))

    def _completion(self, prompt: list[int], params: SamplingParams, oldest: int, answer: Sampled) -> Completion:
        self._watchdog.reset()
        if answer.finish not in ("stop", "length", "aborted") or len(answer.tokens) != len(answer.logprobs):
            raise GeneratorError(
                f"the server {self.url} gave {len(answer.tokens)} tokens, {len(answer.logprobs)} log-probs and the "
                f"finish reason {answer.finish!r}"
            )
        if self.images is not None:
            self.images.check_reading(prompt, answer.read, f"the server {self.url}")
        first, last = answer.weights
        versions = (self._version(first) if first else oldest, self._version(last))
        self._metrics.merge(prompt_metrics(len(prompt), answer.cached))
        logprobs = [min(logprob, 0.0) for logprob in answer.logprobs]
        finish: Any = answer.finish
        return Completion(answer.tokens, logprobs, versions, finish, cached=answer.cached)

    def _label(self, version: int) -> str:
        return f"whet-{self._run}-{version}"

    def _version(self, label: str) -> int:
        """Return the version of a label. Raises ``GeneratorError`` for weights that this run did not publish."""
        prefix, _, number = label.rpartition("-")
        if prefix != f"whet-{self._run}" or not number.isdecimal():
            raise GeneratorError(
                f"the server {self.url} answered with weights {label!r}, which this run did not publish: it was "
                "restarted, or another run uses it"
            )
        return int(number)

    # Pauses and weights

    async def pause(self) -> None:
        """Return once the server is between steps and stays there."""
        api = await self._started()
        self._watchdog.paused = True
        await api.pause(self.config.on_refit == "keep")

    async def resume(self, version: int) -> None:
        """Continue with weights ``version``. Raises ``GeneratorError`` if the server has others."""
        api = await self._started()
        if self._loaded != version:
            await api.rename(self._label(version))
        elif (label := await api.weights()) != self._label(version):
            raise GeneratorError(f"the server {self.url} has weights {label!r} instead of version {version}")
        await api.resume(clear=self.config.on_refit == "recompute")
        self.version = version
        self._watchdog.reset()
        self._watchdog.paused = False

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["ServerGenerator"]]:
        """See ``Engine``. The first engine that enters a refit writes the weights for all."""
        self._settled.clear()
        try:
            await self.pause()
            self.weights_complete, self._next = False, version
            self.folder.enter(self, version)
            yield [self]
            self.weights_complete = True
            await self.resume(version)
        finally:
            self.folder.leave(self)
            self._settled.set()

    async def call(self, target: str, method: str, *args: object) -> list[object]:
        """See ``EngineRanks``. The writer's calls reach the object ``target``, which reads weights; when they are
        complete, every engine has its server load them."""
        answers = [await self.folder.call(target, method, *args)] if self.folder.writer is self else []
        if method == "finish":
            api, folder = await self._started(), await self.folder.written()
            try:
                await api.load(folder, self._label(self._next))
            except RefusedError as error:
                raise RefitError(f"{error}. It must see the folder under the same path: generator.folder") from None
            self._loaded = self._next
        return answers

    async def sleep(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        await self.pause()

    async def wake(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        if not new_weights:
            await self.resume(self.version)

    # Start and end

    async def _started(self) -> Api:
        async with self._starting:
            if self._closed:
                raise GeneratorError("the generator is closed")
            if self._api is None:
                self._client = self._client or Client(self.url, self.config.key(), self.config.deadline)
                protocol = VllmApi if self.config.protocol == "vllm" else SglangApi
                api: Api = protocol(self._client, self.config.model)
                await self._find(self._client)
                await api.check(self._vocab, self.config.max_context)
                if self.tokenizer is not None:
                    await check_tokenizer(api, self._client, self.tokenizer, "model.path")
                self._api = api
            return self._api

    async def _find(self, client: Client) -> None:
        """Return when the server answers."""
        while (status := await client.status("/health")) != 200:
            if not self._returns:
                where = f"at {self.url} (of {', '.join(self.config.urls)})"
                if status == 0:
                    raise ConfigError(f"generator.urls: nothing answers {where}; start the servers first")
                raise ConfigError(
                    f"generator.urls: /health gives HTTP {status} {where}; if your server has started, another program "
                    "answers there"
                )
            await asyncio.sleep(_RETURNS)

    async def close(self) -> None:
        """Let the server continue, and close the connections. Requests in flight end with finish reason
        ``aborted``."""
        self._closed = True
        self._settled.set()  # wakes waiting requests
        for task in (tasks := list(self._in_flight)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        api, client = self._api, self._client
        if api is not None and self._watchdog.paused:
            with suppress(WhetError, TimeoutError):
                await asyncio.wait_for(api.resume(clear=False), _CLOSING)
        if client is not None:
            await client.close()
        if self.folder.writer is None:
            self.folder.close()
