"""The in-process generator: a transformers model sampled on the process's compute thread, awaited from asyncio.

Who waits for what: ``sample`` puts a request into the inbox and awaits its future. Each decoder step is a turn of the
compute thread, and asks for the next one at its end while there is something to sample. ``pause`` awaits the end of the
step under way; while paused no step touches weights or rows. Every wait has the config's deadline. If a step fails,
every request under way and every later one fails with its error.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.base.dtype import torch_dtype
from whet.base.errors import ConfigError, DeadlineError, GeneratorError, RefitError, WhetError
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.torch.cached_model import open_engine
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.decoder import Counters, Decoder, Request
from whet.engines.torch.engine_model import OpenEngine, named_weights
from whet.metrics import Metrics
from whet.processes.compute import COMPUTE, compute
from whet.processes.machine import bind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TorchGenerator:
    """Samples from ``model``, which belongs to the generator from now on (build it with ``build_engine_model``).

    A completion is a function of weights, prompt and parameters, to the bit, whatever runs beside it.
    """

    def __init__(
        self,
        config: TorchGeneratorConfig,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        cores: Sequence[int] | None = None,
        record_experts: bool = False,
    ) -> None:
        """``cores``: those that the compute thread is bound to with the first step; None: to none. With
        ``record_experts`` completions tell which experts their tokens went to; raises ``ConfigError`` where a model has
        no routers that are known."""
        if config.dtype != "auto" and model.dtype != torch_dtype(config.dtype):
            raise ConfigError(f"generator.dtype is {config.dtype}, but the model given to it is {model.dtype}")
        self.config = config
        self.tokenizer = tokenizer
        self.engine = open_engine(model, config.packed_weights)
        if record_experts:
            self.engine.record_experts()
        self.cores = cores
        remembered = config.prefix_tokens if self.engine.recalls else 0
        self._decoder = Decoder(self.engine, tokenizer, config.max_batch, config.prefill_tokens, remembered)
        self._told = self._decoder.counters.copy()
        self._lock = threading.Lock()  # guards the fields below
        self._inbox: list[Request] = []
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._paused = self._stepping = self._closed = False  # stepping: a step is under way, or asked for
        self._failure: BaseException | None = None
        self._complete, self._refitting = True, False  # whether the weights are all there, whether new ones are coming
        self._progress = time.monotonic()  # when a step last began or ended
        self._placed = False
        self._gathering: list[Request] = []  # requests of the present tick of the loop

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.model.dtype

    @property
    def version(self) -> int:
        return self._decoder.version

    @property
    def counters(self) -> Counters:
        """What the engine has done so far."""
        return self._decoder.counters

    def tally(self) -> Metrics:
        """See ``Refittable``."""
        spent = self.counters.since(self._told)
        self._told = self.counters.copy()
        return prompt_metrics(spent.prompt_tokens, spent.prompt_tokens - spent.prefill_tokens)

    # Sampling

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """Continue ``prompt``. A prompt that fills the context gives no token and finish reason ``length``.

        Raises WhetError for parameters that cannot be met and DeadlineError when the engine makes no progress.
        """
        request = self._request(prompt, params)
        if request.limit <= 0:
            request.finish = "length"
            return request.completion(self.version)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._futures[request] = future
        if not self._gathering:  # tasks that are ready in this tick run before the submission: they share a prefill
            loop.call_soon(self._submit)
        self._gathering.append(request)
        try:
            while not (await asyncio.wait({future}, timeout=self.config.deadline))[0]:
                self._check_progress()
            return future.result()
        finally:
            self._futures.pop(request, None)
            request.cancelled = True  # for whoever stops waiting; a finished request is no longer looked at

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        check_request(prompt, params, self.engine.vocab, stops=self.tokenizer is not None)
        limit = min(params.max_new_tokens, self.config.max_context - len(prompt))
        return Request(tuple(prompt), params, limit)

    def _submit(self) -> None:
        """Runs in the loop, once per tick that brought requests."""
        requests, self._gathering = self._gathering, []
        with self._lock:
            error = self._unusable()
            if error is None:
                self._inbox += requests
                self._ask_for_step()
        if error is not None:
            for request in requests:
                self._settle(request, error)

    def _unusable(self) -> Exception | None:
        if self._failure is not None:
            return _engine_error(self._failure)
        if self._closed:
            return WhetError("the generator is closed")
        if not (self._complete or self._refitting):
            return RefitError("the generator holds an incomplete set of weights; load a complete set first")
        return None

    def _settle(self, request: Request, outcome: Completion | Exception) -> None:
        """Runs in the loop."""
        future = self._futures.get(request)
        if future is None or future.done():
            return
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _check_progress(self) -> None:
        with self._lock:
            idle = time.monotonic() - self._progress
            if not self._paused and idle > self.config.deadline:
                raise DeadlineError(
                    f"the torch generator has made no progress for {idle:.0f} s (generator.deadline is "
                    f"{self.config.deadline:g} s): a step takes too long for this machine, or something is stuck"
                )

    # On the compute thread

    def _ask_for_step(self) -> None:
        """Called with the lock, from any thread."""
        rests = self._paused or self._closed or self._failure
        if not (self._stepping or rests) and (self._inbox or self._decoder.busy):
            self._stepping = True
            COMPUTE.submit(self._step, name="a decode step", turn=True)

    def _step(self) -> None:
        with self._lock:
            self._progress = time.monotonic()
            rests = self._paused or self._closed
            if not rests:
                self._decoder.queue.extend(self._inbox)
                self._inbox.clear()
        outcomes: list[tuple[Request, Completion | Exception]]
        try:
            self._place()
            ended = [] if rests else self._decoder.step()
            outcomes = [(request, request.completion(self.version)) for request in ended]
        except BaseException as failure:
            self._failure = failure
            outcomes = [(request, _engine_error(failure)) for request in list(self._futures)]
        with self._lock:
            self._stepping = False
            self._progress = time.monotonic()
            self._ask_for_step()
        self._report(outcomes)

    def _place(self) -> None:
        """Onto the cores and threads that were asked for."""
        if self._placed:
            return
        self._placed = True
        if self.cores is not None:
            bind(self.cores)
        threads = self.config.threads or (len(self.cores) if self.cores else None)
        if threads is not None:
            torch.set_num_threads(threads)

    def _report(self, outcomes: list[tuple[Request, Completion | Exception]]) -> None:
        """Hand results to the loops that wait for them."""
        for request, outcome in outcomes:
            future = self._futures.get(request)
            if future is not None and not future.get_loop().is_closed():
                future.get_loop().call_soon_threadsafe(self._settle, request, outcome)

    # Pauses and weights

    async def pause(self) -> None:
        """Return once the engine is between steps and stays there. Raises DeadlineError when a step does not end."""
        with self._lock:
            self._paused = True
        await self._standstill()
        if self._failure is not None:
            raise _engine_error(self._failure)

    async def _standstill(self) -> None:
        """Return when the step under way has ended; the caller has seen to it that there is no next one."""
        if self._stepping:
            await compute(_nothing, deadline=self.config.deadline, turn=True)  # after the step, which is a turn, too

    async def resume(self, version: int) -> None:
        """Go on with weights ``version``. Prompts computed under older weights are not used for new requests; of those
        under way, ``config.on_refit`` decides."""
        with self._lock:
            if self._stepping:
                raise WhetError("resume without pause: the engine is in the middle of a step")
            self._decoder.forget_prefixes()
            if self.config.on_refit == "recompute":
                self._decoder.readmit()
            self.engine.weights_changed()
            self._decoder.version = version
            self._paused = False
            self._progress = time.monotonic()
            self._ask_for_step()

    async def sleep(self, new_weights: bool = False) -> None:
        """As ``pause``. With ``new_weights`` the old ones are freed; else what it holds stays where it is."""
        await self.pause()
        if new_weights:
            self._decoder.forget_prefixes()
            await compute(self.engine.release)

    async def wake(self, new_weights: bool = False) -> None:
        """Go on where ``sleep`` left off, or leave that to the refit that follows."""
        if new_weights:
            return
        if self.engine.released:
            raise WhetError("the generator slept without its weights, so new ones must come before it goes on")
        with self._lock:
            self._paused = False
            self._progress = time.monotonic()
            self._ask_for_step()

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list[OpenEngine]]:
        """See ``Refittable``. Raises RefitError when a weight is missing, unexpected or of another shape."""
        if adapter:
            raise ConfigError("the torch generator takes merged weights only: set weights.lora=merged")
        await self.pause()
        with self._lock:
            self._complete, self._refitting = False, True
            self._decoder.forget_prefixes()
        try:
            model = self.engine.open()
            yield [model]
            await compute(model.check_complete)
            self._complete = True
        finally:
            with self._lock:
                self._refitting = False
                waiting = [] if self._complete else list(self._inbox)
                self._inbox = self._inbox if self._complete else []
            incomplete = self._unusable()
            self._report([(request, incomplete) for request in waiting if incomplete is not None])
        await self.resume(version)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The engine's own tensors under their Hugging Face names; a head tied to the embedding is not repeated."""
        return named_weights(self.engine.model)

    async def close(self) -> None:
        """Requests under way return what they have, with finish reason ``aborted``."""
        with self._lock:
            self._closed = True
        await self._standstill()
        for request in list(self._futures):
            self._settle(request, request.completion(self.version))


def _nothing() -> None:
    """What is waited for is what comes before it."""


def _engine_error(failure: BaseException) -> WhetError:
    if isinstance(failure, WhetError):
        return failure
    error = GeneratorError(f"the torch generator's engine failed: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error
