"""The generator on vLLM: requests go to an engine in processes of its own, and tokens come back.

Who waits for what: the engine starts with the first call that needs it. ``sample`` hands its request over and awaits
the outputs; ``pause`` awaits the end of the engine's step, after which requests under way wait; ``resume`` lets them go
on, with keys and values that are computed anew, or kept (``on_refit``). Every wait has the config's deadline. A dead or
frozen engine fails every wait with an error that names its processes. When this process ends, however it ends, the
engine ends (``vllm_processes.py``).
"""

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from whet.base.dtype import torch_dtype
from whet.base.errors import DeadlineError, GeneratorError, RefitError, WhetError
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.config import Deployment
from whet.engines.vllm.adapter import NUMBER
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.processes import VllmProcesses
from whet.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
_TOKENS_PER_OUTPUT = 16  # the engine reports so many at a time; often enough to see that it is alive


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
        self.processes = VllmProcesses(config, self.deployment)
        self.version = 0
        self.weights_complete = False  # whether a set of weights has come
        self.under_adapter = False  # whether a LoRA adapter came with them, which requests are answered under
        self._vocab = int(model_config.get_text_config().vocab_size)
        self._engine: AsyncLLM | None = None
        self._failure: GeneratorError | None = None  # of the start
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._under_way: dict[str, asyncio.Task[Completion]] = {}
        self._settled = asyncio.Event()  # no weights are on their way
        self._settled.set()
        self._paused = self._closed = False
        self._without_cache = False  # awake for new weights, without room for keys and values yet
        self._progress = time.monotonic()  # when the engine last said something
        self._metrics = Metrics()

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config.dtype)

    @property
    def ranks(self) -> int:
        """The number of processes that share the model's matrices."""
        return self.config.tensor

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"the vLLM engine (processes {', '.join(map(str, self.processes.ids)) or 'not started'})"

    def tally(self) -> Metrics:
        """See ``Refittable``."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    # Sampling

    async def sample(self, prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        """Continue ``prompt``. A prompt that fills the context gives no token and finish reason ``length``.

        Raises WhetError for parameters that cannot be met, DeadlineError when the engine makes no progress and
        GeneratorError when it has died.
        """
        await self._settled.wait()
        self._check(prompt, params)
        limit = min(params.max_new_tokens, self.config.max_context - len(prompt))
        if limit <= 0:
            return Completion([], [], (self.version, self.version), "length")
        engine = await self._started()
        name = f"whet-{next(self._ids)}"
        task = asyncio.ensure_future(self._collect(engine, name, prompt, self._translate(params, limit)))
        self._under_way[name] = task
        try:
            while not task.done():
                left = self._progress + self.config.deadline - time.monotonic()
                patience = self.config.deadline if self._paused or left <= 0 else left
                if not (await asyncio.wait({task}, timeout=patience))[0]:
                    self._check_progress()
            return task.result()
        finally:
            del self._under_way[name]
            task.cancel()  # for whoever stops waiting: the engine drops the request

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if self._closed:
            raise WhetError("the generator is closed")
        if not self.weights_complete:
            raise RefitError("the vLLM engine holds no complete set of weights; publish one first")
        if (reason := self.config.cannot_sample(params.distribution)) is not None:
            raise WhetError(reason)
        check_request(prompt, params, self._vocab, stops=self.tokenizer is not None)

    def _translate(self, params: SamplingParams, limit: int) -> Any:
        """Return the same in vLLM's words. Nothing ends a completion but what ``params`` names."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        d = params.distribution
        filters = {} if params.greedy else {"top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p}
        return vllm.SamplingParams(
            temperature=0.0 if params.greedy else d.temperature,
            seed=params.seed % 2**63,
            max_tokens=limit,
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop),
            include_stop_str_in_output=True,
            ignore_eos=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=_TOKENS_PER_OUTPUT,
            **filters,
        )

    async def _collect(self, engine: "AsyncLLM", name: str, prompt: list[int], params: Any) -> Completion:
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        last = None
        if len(self._under_way) <= 1:
            self._progress = time.monotonic()  # an idle engine had nothing to say
        salt = str(self.version) if self.config.on_refit == "keep" else None  # it finds nothing that older weights left
        inputs = tokens_input(prompt, cache_salt=salt)
        try:
            async for output in engine.generate(inputs, params, name, lora_request=self._adapter()):
                last = output
                self._progress = time.monotonic()
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._died(error) from error
        assert last is not None
        out = last.outputs[0]
        if out.finish_reason not in ("stop", "length", "abort"):
            raise GeneratorError(f"{self.name} gave up on a request: {out.finish_reason}")
        self._metrics.merge(prompt_metrics(len(prompt), last.num_cached_tokens or 0))
        tokens = list(out.token_ids)
        spans = [int(span.version) for span in out.weight_versions or ()] or [self.version]
        return Completion(
            tokens,
            [min(logprob, 0.0) for logprob in out.logprobs.logprobs[: len(tokens)]] if out.logprobs else [],
            (spans[0], spans[-1]),
            "aborted" if out.finish_reason == "abort" else out.finish_reason,
            cached=last.num_cached_tokens or 0,
        )

    def _adapter(self) -> Any:
        """Return a request's reference to the adapter, which the engine's processes hold already: there is no file."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("whet", NUMBER, "/published/without/files") if self.under_adapter else None

    def _check_progress(self) -> None:
        idle = time.monotonic() - self._progress
        if not self._paused and idle >= self.config.deadline:
            raise DeadlineError(
                f"{self.name} has said nothing for {idle:.0f} s (generator.deadline is {self.config.deadline:g} s): a "
                "step takes too long for this machine, or the engine is stuck"
            )

    # Pauses and weights

    async def pause(self) -> None:
        """Return once the engine is between steps and stays there. Raises DeadlineError when a step does not end."""
        engine = await self._started()
        self._paused = True
        await self._bounded(engine.pause_generation(mode="keep", clear_cache=False), "the pause")

    async def resume(self, version: int) -> None:
        """Go on with weights ``version``. No key or value computed under older weights is used again; with
        ``config.on_refit`` "keep", but for requests under way."""
        engine = await self._started()
        if self.config.on_refit == "recompute" or self._without_cache:
            await self._bounded(self._forget(engine), "the reset of its prefix cache")
        await self._bounded(engine.update_weight_version(str(version)), "the new version")
        self.version = version
        if self._without_cache:
            await self._bounded(engine.wake_up(["kv_cache"]), "waking")
            self._without_cache = False
        self._progress = time.monotonic()
        self._paused = False
        await self._bounded(engine.resume_generation(), "the end of the pause")

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["VllmGenerator"]]:
        """See ``Refittable``."""
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
            raise RefitError(f"{self.name} did not forget the keys and values of older weights")

    async def sleep(self, new_weights: bool = False) -> None:
        """See ``Generator``. On a GPU the weights go to the CPU's memory, or are dropped where new ones come and
        ``config.sleep_level`` is 2, and keys and values are dropped, in a ``Deployment`` that sleeps (vLLM's sleep
        mode); vLLM has nothing like it on CPUs."""
        if self._engine is None:
            return
        await self.pause()
        if self.processes.frees_memory:
            level = self.config.sleep_level if new_weights else 1
            if level == 2:
                self.weights_complete = False
                self._settled.clear()  # requests wait for the refit
            await self._bounded(self._engine.sleep(level=level, mode="keep"), "falling asleep")

    async def wake(self, new_weights: bool = False) -> None:
        """See ``Generator``."""
        if self._engine is None:
            return
        if not (self._settled.is_set() or new_weights):
            raise RefitError(f"{self.name} has no weights to wake with: generator.sleep_level=2 dropped them")
        if self.processes.frees_memory:
            if not new_weights:  # an engine that is all awake goes on at once
                await self._bounded(self._forget(self._engine), "the reset of its prefix cache")
            await self._bounded(self._engine.wake_up(["weights"] if new_weights else None), "waking")
        if new_weights:
            self._without_cache = self.processes.frees_memory
            return
        self._progress = time.monotonic()
        self._paused = False
        await self._bounded(self._engine.resume_generation(), "the end of the pause")

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        """Call ``method`` of the object that ``module:Class`` makes of the engine's model (a ``VllmModel``), in each of
        the engine's worker processes; the object is made once. Arguments and results are plain data."""
        engine = await self._started()
        work = engine.collective_rpc("whet_call", args=(target, method, *args))
        answers: list[tuple[Any, str | None]] = await self._bounded(work, method)
        if len(answers) != self.config.tensor:
            raise GeneratorError(f"{len(answers)} of {self.config.tensor} ranks of {self.name} answered: {method}")
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise GeneratorError(f"{self.name} failed at {method} on rank {rank}: {error}")
        return [answer for answer, _ in answers]

    async def _bounded(self, awaitable: Awaitable[T], what: str) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await asyncio.wait_for(awaitable, self.config.deadline)
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} did not answer within {self.config.deadline:g} s (generator.deadline): {what}"
            ) from None
        except EngineDeadError as error:
            raise self._died(error) from error
        except WhetError:
            raise
        except Exception as error:  # vLLM raises what failed in the worker as a plain exception with its text
            raise GeneratorError(f"{self.name} failed at {what}: {error}") from error

    def _died(self, error: BaseException) -> GeneratorError:
        return GeneratorError(
            f"{self.name} died or failed: {error}. Its own messages are above (more of them with "
            "VLLM_LOGGING_LEVEL=INFO); the system's log says whether it ran out of memory"
        )

    # Start and end

    async def _started(self) -> "AsyncLLM":
        async with self._starting:
            if self._closed:
                raise WhetError("the generator is closed")
            if self._failure is not None:
                raise self._failure
            if self._engine is None:
                try:
                    self._engine = await self.processes.start(self.model_config, self.tokenizer)
                    first = self._engine.update_weight_version(str(self.version))
                    await self._bounded(first, "its first version")
                except BaseException as error:
                    engine, self._engine = self._engine, None
                    await self.processes.end(engine)
                    if not isinstance(error, Exception):
                        raise
                    lora = "; weights.lora=merged needs no LoRA of vLLM's" if self.deployment.adapter else ""
                    self._failure = GeneratorError(
                        f"the vLLM engine did not start: {error}. Its own messages are above (more of them with "
                        f"VLLM_LOGGING_LEVEL=INFO); generator.start_deadline is {self.config.start_deadline:g} s{lora}"
                    )
                    raise self._failure from error
                self._progress = time.monotonic()
            return self._engine

    async def close(self) -> None:
        """End the engine's processes. Requests under way return what they have, with finish reason ``aborted``."""
        async with self._starting:
            self._closed = True
            self._settled.set()  # requests that wait are told
            engine, self._engine = self._engine, None
        if engine is not None:
            tasks = list(self._under_way.values())
            try:
                await asyncio.wait_for(engine.abort(list(self._under_way)), 5)
                if tasks:
                    await asyncio.wait(tasks, timeout=5)
            except Exception:  # a dead engine can't abort; its requests fail with their own error
                pass
        await self.processes.end(engine)
        del engine
        gc.collect()  # vLLM's object is part of cycles and fails when it is deleted at the interpreter's end
