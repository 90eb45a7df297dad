"""What a vLLM worker process can do beyond vLLM: run an object of ours beside the model, on request. vLLM mixes
``VllmWorker`` into its own worker class."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.generators.vllm_model import VllmModel


class VllmWorker:
    """Called by name through the engine (``VllmGenerator.call``)."""

    distributed_init_method: str  # vLLM's: where the ranks meet

    def whet_started(self) -> tuple[list[int], str]:
        """Called when all ranks have met: (this process and the engine's core, the file through which they met; "" for
        none). vLLM leaves that file behind and, on CPUs, the memory that its ranks share; the memory needs no name any
        more, so it loses it here, and is gone when they end, however they do."""
        path = self.distributed_init_method.removeprefix("file://")
        met = "" if path == self.distributed_init_method else path
        if met:
            for shared in Path("/dev/shm").glob(f"{Path(met).name}-*"):
                shared.unlink(missing_ok=True)
        return [os.getpid(), os.getppid()], met

    def whet_call(self, target: str, method: str, *args: Any) -> tuple[Any, str | None]:
        """Call ``method`` of the object that ``module:Class`` makes of the model; it lives as long as the worker.
        (answer, None) or (None, what failed): an exception of one rank would leave vLLM with the answers of the others
        for those of the next call."""
        try:
            return self._whet_answer(target, method, args), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _whet_answer(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        objects: dict[str, Any] = self.__dict__.setdefault("_whet_objects", {})
        if target not in objects:
            module, _, name = target.partition(":")
            objects[target] = getattr(importlib.import_module(module), name)(self._whet_model())
        return getattr(objects[target], method)(*args)

    def _whet_model(self) -> "VllmModel":
        from whet.generators.vllm_model import VllmModel

        return self.__dict__.setdefault("_whet_vllm_model", VllmModel(self))
