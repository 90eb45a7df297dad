"""A replica of an engine on another node: it is built in an actor of the run's cluster, as it would be in the run's
process, and called there. Waiting is up to the cluster (``whet.cluster.base.Service``) and the engine.

    Router -> RemoteGenerator ==== cluster ====> HostedEngine -> VllmGenerator -> vLLM in separate processes
"""

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whet.base.errors import GeneratorError, RefitError, WhetError, WorkerError
from whet.base.lazy import torch_dtype
from whet.cluster.base import RankInfo
from whet.engines.base import Completion, SamplingParams, StreamingEngine, check_completion, pausable
from whet.engines.config import Deployment, GeneratorConfig
from whet.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class HostedEngine:
    """The remote side. The engine uses the GPUs that the cluster makes visible to this process."""

    def __init__(self, config: GeneratorConfig, info: RankInfo) -> None:
        self._config = config
        self._refit: AbstractAsyncContextManager[Any] | None = None
        self._streams = defaultdict[int, asyncio.Queue[list[int]]](asyncio.Queue)  # new tokens; at last none
        self.engine: Any = None

    def open(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> None:
        """Build the engine; called before all other methods."""
        gpus = tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        engine = self._config.checked_replica(model, tokenizer, replace(deployment, gpus=gpus))
        self.engine = pausable(engine, "generator.on_cluster")

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> tuple[Completion, Metrics]:
        """Return a completion, and the metrics since the last one."""
        completion = await self.engine.sample(prompt, params, session)
        return check_completion(completion, prompt, params, self.engine), self.engine.tally()

    async def stream(
        self, number: int, prompt: list[int], params: SamplingParams, session: str
    ) -> tuple[Completion, Metrics]:
        """Like ``sample``. Meanwhile ``handed_out`` returns the new tokens, if the engine hands out any."""
        queue = self._streams[number]
        try:
            engine = self.engine
            if not isinstance(engine, StreamingEngine):
                return await self.sample(prompt, params, session)
            completion = await engine.stream(prompt, params, session, queue.put_nowait)
            return check_completion(completion, prompt, params, engine), self.engine.tally()
        except asyncio.CancelledError:
            self._streams.pop(number, None)  # its tokens are not received any more
            raise
        finally:
            queue.put_nowait([])

    async def handed_out(self, number: int) -> list[int]:
        """Wait for new tokens of a stream and return them; at its end none. Either call of a stream may come first."""
        queue = self._streams[number]
        tokens = await queue.get()
        if not tokens:
            self._streams.pop(number, None)  # which a cancelled stream has done already
        return tokens

    async def begin_refit(self, version: int, adapter: bool) -> None:
        self._refit = self.engine.refit(version, adapter)
        await self._refit.__aenter__()

    async def end_refit(self, complete: bool) -> None:
        assert self._refit is not None
        refit, self._refit = self._refit, None
        if complete:
            await refit.__aexit__(None, None, None)
        else:
            await refit.__aexit__(RefitError, RefitError("the refit broke off"), None)

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()


class RemoteGenerator:
    """The local side, a ``PausableEngine``. The actor starts with the first call, and refuses the same requests as the
    engine."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None",
        deployment: Deployment,
        number: int = 0,
    ) -> None:
        """``number``: of the replica. With ``deployment.sleeps`` it has the devices of as many ranks of the learner as
        it has ranks itself, the first replica of the first ones."""
        if deployment.cluster is None:
            raise WhetError("generator.on_cluster needs a run with a cluster")
        self.config = config
        self._arguments = (model, tokenizer, replace(deployment, cluster=None, cores=None))
        self._built: asyncio.Future[None] | None = None  # the engine, once it was requested
        shares = number * config.ranks if deployment.sleeps else None
        self.service = deployment.cluster.serve(HostedEngine, config, config.ranks, config.deadline, shares)
        self._metrics = Metrics()
        self._streams = itertools.count()

    @property
    def dtype(self) -> "torch.dtype":
        return torch_dtype(self.config.dtype)

    @property
    def ranks(self) -> int:
        """See ``EngineRanks``."""
        return self.config.ranks

    def tally(self) -> Metrics:
        """See ``Engine``."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    async def _ask(self, method: str, *args: object) -> Any:
        try:
            if self._built is None:
                self._built = asyncio.ensure_future(self.service.call("open", *self._arguments))
            await asyncio.shield(self._built)  # all calls wait for it, and each reports its failure
            return await self.service.call(method, *args)
        except WorkerError as error:
            raise GeneratorError(f"the engine ({self.service.where}) is gone: {error}") from error
        except GeneratorError as error:
            where = f" (This engine is {self.service.where}; its messages are in the cluster's logs.)"
            raise type(error)(str(error).removesuffix(where) + where) from error

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """See ``Engine``."""
        completion: Completion
        completion, metrics = await self._ask("sample", prompt, params, session)
        self._metrics.merge(metrics)
        return completion

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """See ``StreamingEngine``."""
        number = next(self._streams)
        completion: Completion
        answer = asyncio.ensure_future(self._ask("stream", number, prompt, params, session))
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # of a call that was given up
        try:
            while tokens := await self._ask("handed_out", number):
                sampled(tokens)
            completion, metrics = await answer
        finally:
            answer.cancel()
        self._metrics.merge(metrics)
        return completion

    async def call(self, target: str, method: str, *args: object) -> list[object]:
        """See ``EngineRanks``."""
        answers: list[Any] = await self._ask("engine.call", target, method, *args)
        return answers

    async def pause(self) -> None:
        """See ``PausableEngine``."""
        await self._ask("engine.pause")

    async def resume(self, version: int) -> None:
        """See ``PausableEngine``."""
        await self._ask("engine.resume", version)

    async def sleep(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        await self._ask("engine.sleep", new_weights)

    async def wake(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        await self._ask("engine.wake", new_weights)

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["RemoteGenerator"]]:
        """See ``Engine``."""
        await self._ask("begin_refit", version, adapter)
        try:
            yield [self]
        except BaseException:
            with suppress(WhetError):  # the first error is more informative
                await self._ask("end_refit", False)
            raise
        await self._ask("end_refit", True)

    async def close(self) -> None:
        """Stop the engine and its actor."""
        if self._built is not None:
            self._built.cancel()
        await self.service.close()
