"""An extension of vLLM's workers that runs our objects next to the model, on request. vLLM mixes ``VllmWorker`` into
its worker class."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.engines.vllm.model import VllmModel


class VllmWorker:
    """The methods that ``VllmGenerator.call`` calls by name, through the engine."""

    distributed_init_method: str  # set by vLLM: the file through which its ranks met, or an address

    def whet_call(self, target: str, method: str, *args: object) -> tuple[object, str | None]:
        """Call ``method`` of the object that ``module:Class`` creates from the model; it lives as long as the worker.
        Return (answer, None) or (None, error): an exception on one rank would leave the other ranks' answers in vLLM's
        queue, to be taken for answers of the next call."""
        try:
            return self._whet_answer(target, method, args), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _whet_answer(self, target: str, method: str, args: tuple[object, ...]) -> object:
        objects: dict[str, Any] = self.__dict__.setdefault("_whet_objects", {})
        if target not in objects:
            module, _, name = target.partition(":")
            objects[target] = getattr(importlib.import_module(module), name)(self._whet_model())
        return getattr(objects[target], method)(*args)

    def _whet_model(self) -> "VllmModel":
        from whet.engines.vllm.model import VllmModel

        if "_whet_vllm_model" not in self.__dict__:
            # All ranks have met, so the shared memory on CPUs can be unlinked, and is freed when they exit.
            for shared in Path("/dev/shm").glob(f"{Path(self.distributed_init_method).name}-*"):
                shared.unlink(missing_ok=True)
            self._whet_vllm_model = VllmModel(self)
        return self._whet_vllm_model
