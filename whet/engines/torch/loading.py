"""A transformers model for an engine: built without or with weights, which are loaded in place under their Hugging Face
names."""

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.models.loading import new_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_engine_model(
    config: "PretrainedConfig",
    state: dict[str, Tensor] | None,
    dtype: torch.dtype,
    device: str = "cpu",
    vision: bool = False,
) -> "PreTrainedModel":
    """Return a causal language model of ``config``, or its model with a ``vision`` tower, with the weights ``state``
    (Hugging Face names), or without weights.

    Without ``state`` the weights are uninitialised memory, to save the time of a random initialisation.
    """
    from transformers.initialization import no_init_weights

    with torch.device(device), no_init_weights():
        engine_config = copy.deepcopy(config)  # the engine changes its attention; a learner may use the same config
        model = new_model(engine_config, dtype, vision)
    model.tie_weights()
    if state is not None:
        loading = Loading(model)
        loading.load(state.items())
        loading.check_complete()
    return model


def named_weights(model: "PreTrainedModel") -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer once, under its Hugging Face name; a tied head is not repeated."""
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


class Loading:
    """Copies tensors into the model's tensors in place, in several calls, casting to its dtype.

    At the end the set must be complete. A tied head is optional; if present it must equal the embedding it is tied to.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._targets = dict(model.state_dict(keep_vars=True))
        self._written: dict[tuple[int, torch.Size], str] = {}
        self._wrong: dict[str, str] = {}  # name -> reason

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of the tensors."""
        for name, source in named:
            target = self._targets.get(name)
            if target is None:
                self._wrong[name] = "the model has no such weight"
            elif target.shape != source.shape:
                self._wrong[name] = f"shape {list(source.shape)}, the model's is {list(target.shape)}"
            elif (first := self._written.setdefault((target.data_ptr(), target.shape), name)) != name:
                if not torch.equal(target, source.to(target.device, target.dtype)):
                    self._wrong[name] = f"differs from {first}, to which the model ties it"
            else:
                target.copy_(source)

    def check_complete(self) -> None:
        """Raise ``RefitError``, naming tensors that are missing, unexpected or of another shape."""
        missing = (
            name for name, target in self._targets.items() if (target.data_ptr(), target.shape) not in self._written
        )
        wrong = dict.fromkeys(missing, "missing") | self._wrong
        if wrong:
            lines = [f"{name}: {why}" for name, why in wrong.items()]
            more = f"\n  ... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise RefitError("the weights do not fit the model:\n  " + "\n  ".join(lines[:8]) + more, wrong)
