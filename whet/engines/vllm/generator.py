"""The generator on vLLM: requests go to an engine in separate processes, and tokens come back.

Who waits for whom: the engine starts with the first call that needs it. ``sample`` submits its request and awaits the
outputs; ``pause`` awaits the end of the engine's step, after which requests in flight wait; ``resume`` continues them,
with a KV cache that is computed again or kept (``on_refit``). Every wait has the config's deadline. A dead or frozen
engine fails every wait with an error that names its processes. When this process ends in any way, the engine ends
(``guard.py``).
"""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from whet.base.errors import ConfigError, GeneratorError, RefitError, WhetError
from whet.base.lazy import torch_dtype
from whet.engines.adapters import BASE
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.config import Deployment
from whet.engines.vllm.adapter import NUMBER
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.engine import VllmEngine
from whet.engines.vllm.images import image_inputs
from whet.engines.vllm.request import completion_of, vllm_params
from whet.engines.watchdog import Watchdog
from whet.metrics import Metrics

if TYPE_CHECKING:
    import vllm
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class VllmGenerator:
    """Samples from a model of ``model_config``. The engine starts with random weights and refuses to sample until a
    complete set was published (``whet.weights.engine``). All calls must come from one event loop."""

    def __init__(
        self,
        config: VllmGeneratorConfig,
        model_config: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        deployment: Deployment | None = None,
    ) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.deployment = deployment or Deployment()
        self.engine = VllmEngine(config, model_config, tokenizer, self.deployment)
        self.version = 0
        self.weights_complete = False  # a set of weights was loaded
        self.under_adapter = False  # a LoRA adapter was loaded too, and requests use it
        self._vocab = int(model_config.get_text_config().vocab_size)
        self._ids = itertools.count()
        self._in_flight: dict[str, asyncio.Task[Completion]] = {}
        self._settled = asyncio.Event()  # set while no refit is in progress
        self._settled.set()
        self._without_cache = False  # awake for new weights, but without a KV cache yet
        self._watchdog = Watchdog(config.deadline)  # an output is progress
        self._metrics = Metrics()

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config.dtype)

    @property
    def ranks(self) -> int:
        """The number of processes that share the model's matrices."""
        return self.config.tensor

    def tally(self) -> Metrics:
        """See ``Engine``."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    # Sampling

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """Continue ``prompt``. A prompt that fills the context gives no token and finish reason ``length``.

        Raises WhetError for invalid parameters, DeadlineError if the engine makes no progress and GeneratorError if it
        has died.
        """
        return await self._sample(prompt, params, None)

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """See ``StreamingEngine``: 16 tokens at a time."""
        return await self._sample(prompt, params, sampled)

    async def _sample(
        self, prompt: list[int], params: SamplingParams, sampled: Callable[[list[int]], None] | None
    ) -> Completion:
        await self._settled.wait()
        self._check(prompt, params)
        limit = min(params.max_new_tokens, self.config.max_context - len(prompt))
        if limit <= 0:
            return Completion([], [], (self.version, self.version), "length")
        engine = await self._started()
        name = f"whet-{next(self._ids)}"
        inputs: Any = None
        if params.images:
            assert self.deployment.images is not None
            inputs = await asyncio.to_thread(image_inputs, prompt, params.images, self.deployment.images)
        work = self._collect(engine, name, prompt, inputs, vllm_params(params, limit), sampled, params.adapter)
        task = asyncio.ensure_future(work)
        self._in_flight[name] = task
        try:
            cause = ": a step takes too long for this machine, or the engine is stuck"
            await self._watchdog.wait(task, f"{self.engine.name} has had no output", cause)
            return task.result()
        finally:
            del self._in_flight[name]
            task.cancel()  # if the caller is cancelled: the engine drops the request

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if self.engine.closed:
            raise GeneratorError("the generator is closed")
        if not self.weights_complete:
            raise RefitError("the vLLM engine has no complete set of weights; publish one first")
        if (reason := self.config.cannot_sample(params.distribution)) is not None:
            raise WhetError(reason)
        check_request(prompt, params, self._vocab, stops=self.tokenizer is not None)
        if params.adapter is not None and not self.under_adapter:
            raise ConfigError(
                f"policy:{params.adapter} can't be asked: the engine has the policy merged into the model. It is asked "
                "in a run with weights.lora=adapter"
            )
        if params.images and self.deployment.images is None:
            raise WhetError("the prompt has images, and the model reads none; set model.vision=frozen or trained")

    async def _collect(
        self,
        engine: "AsyncLLM",
        name: str,
        prompt: list[int],
        inputs: dict[str, Any] | None,
        params: "vllm.SamplingParams",
        sampled: Callable[[list[int]], None] | None,
        adapter: str | None = None,
    ) -> Completion:
        """``inputs``: of a prompt with images, in vLLM's terms."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        last, handed_out = None, 0
        if len(self._in_flight) <= 1:
            self._watchdog.reset()  # an idle engine has no output
        salt = str(self.version) if self.config.on_refit == "keep" else None  # hides cache entries of older weights
        request: Any = tokens_input(prompt, cache_salt=salt)
        if inputs is not None:
            request = inputs if salt is None else inputs | {"cache_salt": salt}
        try:
            async for output in engine.generate(request, params, name, lora_request=self._adapter(adapter)):
                if inputs is not None and last is None:
                    assert self.deployment.images is not None
                    self.deployment.images.check_reading(prompt, output.prompt_token_ids, "vLLM")
                last = output
                self._watchdog.reset()
                if sampled is not None:
                    sampled(list(output.outputs[0].token_ids[handed_out:]))
                    handed_out = len(output.outputs[0].token_ids)
        except (EngineDeadError, EngineGenerateError) as error:
            raise self.engine.died(error) from error
        assert last is not None
        completion = completion_of(last, self.version, self.engine.name)
        self._metrics.merge(prompt_metrics(len(prompt), completion.cached))
        return completion

    def _adapter(self, name: str | None = None) -> "LoRARequest | None":
        """Return a request's reference to a frozen adapter, or to the trained one, which is already in the engine's
        processes, so there is no file."""
        from vllm.lora.request import LoRARequest

        if name is None:
            return LoRARequest("whet", NUMBER, "/published/without/files") if self.under_adapter else None
        if name == BASE:
            return None
        number = NUMBER + 1 + self.config.adapter_names.index(name)
        return LoRARequest(f"whet-{name}", number, self.config.adapters[name])

    # Pauses and weights

    async def pause(self) -> None:
        """Return once the engine is between steps and stays there. Raises DeadlineError if a step does not end."""
        engine = await self._started()
        self._watchdog.paused = True
        await self.engine.bounded(engine.pause_generation(mode="keep", clear_cache=False), "the pause")

    async def resume(self, version: int) -> None:
        """Continue with weights ``version``. No part of the KV cache that was computed under older weights is used
        again; with ``config.on_refit`` "keep", only by requests in flight."""
        engine = await self._started()
        if self.deployment.images is not None:  # features that the old weights have computed
            await self.engine.bounded(engine.reset_encoder_cache(), "the reset of its features of images")
        if self.config.on_refit == "recompute" or self._without_cache:
            await self.engine.bounded(self._forget(engine), "the reset of its prefix cache")
        await self.engine.bounded(engine.update_weight_version(str(version)), "the new version")
        self.version = version
        if self._without_cache:
            await self.engine.bounded(engine.wake_up(["kv_cache"]), "waking")
            self._without_cache = False
        await self._continue(engine)

    async def _continue(self, engine: "AsyncLLM") -> None:
        self._watchdog.reset()
        self._watchdog.paused = False
        await self.engine.bounded(engine.resume_generation(), "the end of the pause")

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["VllmGenerator"]]:
        """See ``Engine``."""
        self._settled.clear()
        try:
            await self.pause()
            self.weights_complete = False
            yield [self]
            self.weights_complete, self.under_adapter = True, adapter
            await self.resume(version)
        finally:
            self._settled.set()

    async def _forget(self, engine: "AsyncLLM") -> None:
        if not await engine.reset_prefix_cache(reset_running_requests=True):
            raise RefitError(f"{self.engine.name} did not clear the KV cache of older weights")

    async def sleep(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``. On a GPU, if the ``Deployment`` sleeps, the weights move to CPU memory, or are
        dropped if new ones follow and ``config.sleep_level`` is 2, and the KV cache is dropped (vLLM's sleep mode,
        which doesn't exist on CPUs)."""
        if self.engine.running is None:
            return
        await self.pause()
        if self.engine.processes.frees_memory:
            level = self.config.sleep_level if new_weights else 1
            if level == 2:
                self.weights_complete = False
                self._settled.clear()  # requests wait for the refit
            await self.engine.bounded(self.engine.running.sleep(level=level, mode="keep"), "falling asleep")

    async def wake(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        if self.engine.running is None:
            return
        if not (self._settled.is_set() or new_weights):
            raise RefitError(f"{self.engine.name} has no weights to wake with: generator.sleep_level=2 dropped them")
        if self.engine.processes.frees_memory:
            if not new_weights:  # a fully awake engine continues at once
                await self.engine.bounded(self._forget(self.engine.running), "the reset of its prefix cache")
            await self.engine.bounded(self.engine.running.wake_up(["weights"] if new_weights else None), "waking")
        if new_weights:
            self._without_cache = self.engine.processes.frees_memory
        else:
            await self._continue(self.engine.running)

    async def call(self, target: str, method: str, *args: object) -> list[object]:
        """See ``EngineRanks``."""
        await self._started()
        return await self.engine.call(target, method, *args)

    # Start and end

    async def _started(self) -> "AsyncLLM":
        begun = self.engine.running is None
        engine = await self.engine.started(self.version)
        if begun:
            self._watchdog.reset()
        return engine

    async def close(self) -> None:
        """Stop the engine's processes. Requests in flight return their tokens so far, with finish reason
        ``aborted``."""
        running = await self.engine.close()
        self._settled.set()  # wakes waiting requests
        if running is not None:
            tasks = list(self._in_flight.values())
            try:
                await asyncio.wait_for(running.abort(list(self._in_flight)), 5)
                if tasks:
                    await asyncio.wait(tasks, timeout=5)
            except Exception:  # a dead engine can't abort; its requests fail with their errors
                pass
        await self.engine.processes.end(running)
        del running
        gc.collect()  # vLLM's object is part of cycles and fails when it is deleted at the interpreter's end
