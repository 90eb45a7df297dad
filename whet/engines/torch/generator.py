"""The in-process generator: a transformers model sampled on the process's compute thread, awaited from asyncio.

Who waits for whom: ``sample`` puts a request into the inbox and awaits its future. Each decoder step is a turn of the
compute thread, and at its end requests the next one while there is something to sample. ``pause`` awaits the end of the
current step; while paused no step uses weights or rows. Every wait has the config's deadline. If a step fails, every
request in flight and every later one fails with its error.
"""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch

from whet.base.errors import ConfigError, RefitError, WhetError
from whet.base.lazy import torch_dtype
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.torch.cached_model import open_engine
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.decoder import Counters, Decoder, Request
from whet.engines.torch.engine_model import OpenEngine
from whet.engines.torch.guesses import Guesser
from whet.engines.torch.in_flight import InFlight, Outcome, engine_error
from whet.engines.watchdog import Watchdog
from whet.metrics import Metrics
from whet.processes.compute import COMPUTE, compute
from whet.processes.machine import bind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from whet.models.image_processor import ImageProcessor


class TorchGenerator:
    """Samples from ``model``, which the generator owns from now on (create it with ``build_engine_model``).

    A completion is a function of weights, prompt and parameters, to the bit, independent of other requests.
    """

    def __init__(
        self,
        config: TorchGeneratorConfig,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        cores: Sequence[int] | None = None,
        record_experts: bool = False,
        images: "ImageProcessor | None" = None,
    ) -> None:
        """``cores``: the compute thread is bound to these cores with the first step; None: not bound. With
        ``record_experts`` completions have the experts of their tokens; raises ``ConfigError`` if the model has no
        supported routers. ``images`` is for a model that reads images."""
        if config.dtype != "auto" and model.dtype != torch_dtype(config.dtype):
            raise ConfigError(f"generator.dtype is {config.dtype}, but the model given to it is {model.dtype}")
        if config.speculative is not None and (why := config.cannot_run(model.config)) is not None:
            raise ConfigError(why)
        self.config, self.tokenizer, self.cores = config, tokenizer, cores
        self.engine = open_engine(model, config.packed_weights, images)
        if record_experts:
            self.engine.record_experts()
        prefix_tokens = config.prefix_tokens if self.engine.reuses_prefixes else 0
        guesser = None if config.speculative is None else Guesser(config.speculative)
        self._decoder = Decoder(self.engine, tokenizer, config.max_batch, config.prefill_tokens, prefix_tokens, guesser)
        self._reported = self._decoder.counters.copy()
        self._lock = threading.Lock()  # guards the fields below
        self._inbox: list[Request] = []
        self._in_flight = InFlight()
        self._stepping = self._closed = self._placed = False  # stepping: a step runs or is requested
        self._failure: BaseException | None = None
        self._complete, self._refitting = True, False  # weights are complete; a refit is in progress
        self._watchdog = Watchdog(config.deadline)  # the begin and the end of a step are progress
        self._gathering: list[Request] = []  # requests of the current tick of the loop

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.model.dtype

    @property
    def version(self) -> int:
        return self._decoder.version

    @property
    def counters(self) -> Counters:
        """The engine's counters so far."""
        return self._decoder.counters

    def tally(self) -> Metrics:
        """See ``Engine``."""
        spent = self.counters.since(self._reported)
        self._reported = self.counters.copy()
        metrics = prompt_metrics(spent.prompt_tokens, spent.prompt_tokens - spent.prefill_tokens)
        if self.config.speculative is not None:
            metrics.sum("time/generator/guessed_tokens", spent.guessed_tokens)
            metrics.mean("time/generator/kept_share", spent.kept_guesses, spent.guessed_tokens)
        return metrics

    # Sampling

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """Continue ``prompt``. A prompt that fills the context gives no token and finish reason ``length``.

        Raises WhetError for invalid parameters and DeadlineError if the engine makes no progress.
        """
        return await self._sample(self._request(prompt, params))

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """See ``StreamingEngine``."""
        request = self._request(prompt, params)
        request.sampled = sampled
        return await self._sample(request)

    async def _sample(self, request: Request) -> Completion:
        if request.limit <= 0:
            request.finish = "length"
            return request.completion(self.version)
        if not self._in_flight.requests:
            self._watchdog.reset()  # an idle engine makes no steps
        future = self._in_flight.add(request)
        if not self._gathering:  # tasks that are ready in this tick run before the submission, so they share a prefill
            future.get_loop().call_soon(self._submit)
        self._gathering.append(request)
        try:
            cause = ": a step takes too long for this machine, or something is stuck"
            await self._watchdog.wait(future, "the torch generator has made no progress", cause)
            return future.result()
        finally:
            self._in_flight.remove(request)
            request.cancelled = True  # if the caller is cancelled; ignored for a finished request

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        check_request(prompt, params, self.engine.vocab, stops=self.tokenizer is not None)
        if params.images:
            if self.engine.images is None:
                raise WhetError("the prompt has images, and the model reads none; set model.vision=frozen or trained")
            self.engine.images.check(prompt, params.images)
        limit = min(params.max_new_tokens, self.config.max_context - len(prompt))
        return Request(tuple(prompt), params, limit)

    def _submit(self) -> None:
        """Submit the requests of one tick; runs in the loop."""
        requests, self._gathering = self._gathering, []
        with self._lock:
            error = self._unusable()
            if error is None:
                self._inbox += requests
                self._ask_for_step()
        if error is not None:
            for request in requests:
                self._in_flight.settle(request, error)

    def _unusable(self) -> Exception | None:
        if self._failure is not None:
            return engine_error(self._failure)
        if self._closed:
            return WhetError("the generator is closed")
        if not (self._complete or self._refitting):
            return RefitError("the generator has an incomplete set of weights; load a complete set first")
        return None

    # On the compute thread

    def _ask_for_step(self) -> None:
        """Request a step; called with the lock, from any thread."""
        rests = self._watchdog.paused or self._closed or self._failure
        if not (self._stepping or rests) and (self._inbox or self._decoder.busy):
            self._stepping = True
            COMPUTE.submit(self._step, name="a decode step", turn=True)

    def _step(self) -> None:
        with self._lock:
            self._watchdog.reset()
            rests = self._watchdog.paused or self._closed
            if not rests:
                self._decoder.queue.extend(self._inbox)
                self._inbox.clear()
        outcomes: list[tuple[Request, Outcome]]
        try:
            self._place()
            ended = [] if rests else self._decoder.step()
            outcomes = [(request, request.completion(self.version)) for request in ended]
        except BaseException as failure:
            self._failure = failure
            outcomes = [(request, engine_error(failure)) for request in self._in_flight.requests]
        self._in_flight.hand_out(list(self._decoder.rows))
        with self._lock:
            self._stepping = False
            self._watchdog.reset()
            self._ask_for_step()
        self._in_flight.report(outcomes)

    def _place(self) -> None:
        """Bind the thread to the configured cores and number of threads."""
        if self._placed:
            return
        self._placed = True
        if self.cores is not None:
            bind(self.cores)
        if (threads := self.config.threads or (len(self.cores) if self.cores else None)) is not None:
            torch.set_num_threads(threads)

    # Pauses and weights

    async def pause(self) -> None:
        """Return once the engine is between steps and stays there. Raises DeadlineError if a step does not end."""
        with self._lock:
            self._watchdog.paused = True
        await self._standstill()
        if self._failure is not None:
            raise engine_error(self._failure)

    async def _standstill(self) -> None:
        """Return when the current step has ended; the caller has made sure that no other one follows."""
        if self._stepping:
            # runs after the step, which is a turn too
            await compute(_nothing, deadline=self.config.deadline, turn=True)

    async def resume(self, version: int) -> None:
        """Continue with weights ``version``. Prompts cached under older weights are not used for new requests; for
        requests in flight, ``config.on_refit`` decides."""
        if self._stepping:
            raise WhetError("resume without pause: the engine is in the middle of a step")
        if self.config.on_refit == "recompute":
            await compute(self._decoder.readmit)
        with self._lock:
            self._decoder.forget_prefixes()
            self.engine.weights_changed()
            self._decoder.version = version
            self._watchdog.paused = False
            self._watchdog.reset()
            self._ask_for_step()

    async def sleep(self, new_weights: bool = False) -> None:
        """Pause. With ``new_weights`` the old weights are freed; otherwise memory is unchanged."""
        await self.pause()
        if new_weights:
            self._decoder.forget_prefixes()
            await compute(self.engine.release, self.config.return_memory)

    async def wake(self, new_weights: bool = False) -> None:
        """Continue after ``sleep``, or wait for the refit that follows."""
        if new_weights:
            return
        if self.engine.released:
            raise WhetError("the generator slept without its weights, so it needs new ones before it continues")
        with self._lock:
            self._watchdog.paused = False
            self._watchdog.reset()
            self._ask_for_step()

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list[OpenEngine]]:
        """See ``Engine``. Raises RefitError if a weight is missing, unexpected or of another shape."""
        if adapter:
            raise ConfigError("the torch generator supports merged weights only; set weights.lora=merged")
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
            self._in_flight.report([(request, incomplete) for request in waiting if incomplete is not None])
        await self.resume(version)

    async def close(self) -> None:
        """Return the requests in flight with their tokens so far and finish reason ``aborted``."""
        with self._lock:
            self._closed = True
        await self._standstill()
        for request in self._in_flight.requests:
            self._in_flight.settle(request, request.completion(self.version))


def _nothing() -> None:
    """Do nothing; awaited to wait for earlier work."""
