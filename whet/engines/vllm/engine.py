"""vLLM's engine in its processes: it starts with the first call that needs it, every call has a deadline, and errors
name the processes."""

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from whet.base.errors import DeadlineError, GeneratorError, WhetError
from whet.engines.config import Deployment
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.processes import VllmProcesses

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class VllmEngine:
    """An engine for a model of ``model_config``, which starts once."""

    def __init__(
        self,
        config: VllmGeneratorConfig,
        model_config: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None",
        deployment: Deployment,
    ) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.processes = VllmProcesses(config, deployment)
        self.running: AsyncLLM | None = None
        self.closed = False
        self._adapter = deployment.adapter
        self._failure: GeneratorError | None = None  # of the start
        self._starting = asyncio.Lock()

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"the vLLM engine (processes {', '.join(map(str, self.processes.ids)) or 'not started'})"

    async def started(self, version: int) -> "AsyncLLM":
        """Return the engine, which the first call starts with weights ``version``. Raises ``GeneratorError`` if it is
        closed or did not start, the same one for every call."""
        async with self._starting:
            if self.closed:
                raise GeneratorError("the generator is closed")
            if self._failure is not None:
                raise self._failure
            if self.running is None:
                try:
                    self.running = await self.processes.start(self.model_config, self.tokenizer)
                    first = self.running.update_weight_version(str(version))
                    await self.bounded(first, "its first version")
                except BaseException as error:
                    engine, self.running = self.running, None
                    await self.processes.end(engine)
                    if not isinstance(error, Exception):
                        raise
                    lora = "; weights.lora=merged doesn't use vLLM's LoRA" if self._adapter else ""
                    self._failure = GeneratorError(
                        f"the vLLM engine did not start: {error}. Its own messages are above (more of them with "
                        f"VLLM_LOGGING_LEVEL=INFO); generator.start_deadline is {self.config.start_deadline:g} s{lora}"
                    )
                    raise self._failure from error
            return self.running

    async def call(self, target: str, method: str, *args: object) -> list[object]:
        """Call ``method`` of the object that ``module:Class`` creates from the engine's model (a ``VllmModel``), in
        each of the engine's worker processes; the object is created once. Arguments and results are plain data."""
        assert self.running is not None
        work = self.running.collective_rpc("whet_call", args=(target, method, *args))
        answers: list[tuple[Any, str | None]] = await self.bounded(work, method)
        if len(answers) != self.config.tensor:
            raise GeneratorError(f"{len(answers)} of {self.config.tensor} ranks of {self.name} answered: {method}")
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise GeneratorError(f"{self.name} failed at {method} on rank {rank}: {error}")
        return [answer for answer, _ in answers]

    async def bounded(self, awaitable: Awaitable[T], action: str) -> T:
        """Await a call of the engine. ``action`` is named in errors."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await asyncio.wait_for(awaitable, self.config.deadline)
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} did not answer within {self.config.deadline:g} s (generator.deadline): {action}"
            ) from None
        except EngineDeadError as error:
            raise self.died(error) from error
        except WhetError:
            raise
        except Exception as error:  # vLLM raises a worker's error as a plain exception with its text
            raise GeneratorError(f"{self.name} failed at {action}: {error}") from error

    def died(self, error: BaseException) -> GeneratorError:
        """Return the error for an engine that is gone."""
        return GeneratorError(
            f"{self.name} died or failed: {error}. Its own messages are above (more of them with "
            "VLLM_LOGGING_LEVEL=INFO); the system's log says whether it ran out of memory"
        )

    async def close(self) -> "AsyncLLM | None":
        """Let no call start it any more, and return it if it runs."""
        async with self._starting:
            self.closed = True
            running, self.running = self.running, None
            return running
