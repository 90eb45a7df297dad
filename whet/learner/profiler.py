"""A profile of a learner's computations in one step, by torch.profiler, as a file in Chrome's trace format.

A profile grows with every operation. So it holds the first micro-batches of scoring and of learning, and the
optimizer's step."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from whet.base.files import error_context
from whet.learner.model import LearnerModel


class Profiler:
    """A profile of the calling thread, from ``Profiler(...)`` to ``end``."""

    def __init__(self, micro_batches: int, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        """``micro_batches``: the number that is recorded of scoring, and of learning."""
        self._left = {False: micro_batches, True: micro_batches}  # by whether the model learns
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._handles: list[Any] = [register_module_forward_pre_hook(self._before_forward)]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._record(True)))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._record(False)))
        self._profile, self._records = profile(activities=self._activities), True
        self._profile.start()

    def end(self, path: Path | None = None) -> None:
        """Stop, and write the profile to a path that ends with ``.json.gz``; without one it is dropped."""
        for handle in self._handles:
            handle.remove()
        self._profile.stop()
        if path is not None:
            with error_context(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(path))

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if isinstance(module, LearnerModel):  # called once for each micro-batch
            self._left[module.model.training] -= 1
            self._record(self._left[module.model.training] >= 0)

    def _record(self, on: bool) -> None:
        if on != self._records:
            self._profile.toggle_collection_dynamic(on, self._activities)
            self._records = on
