"""Stand-ins for a GPU, torch's process groups and Transformer Engine, which Megatron Core expects, where they are
missing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

_default_group = mappings.get_tensor_model_parallel_group_if_none


class OneRank:
    """A group of one process, which needs no process group of torch."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


Group = dist.ProcessGroup | OneRank


def apply_stand_ins() -> None:
    """Set up what all layers share. Let one process run without torch's process groups, where Megatron Core would drop
    the given group; and only where torch finds no GPU, name the CPU as the current device, on which the results of
    collectives are allocated. May be called any number of times."""
    for module in (layers, mappings):
        module.get_tensor_model_parallel_group_if_none = _given_group
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # of gathered activations
        parallel_state._set_global_memory_buffer()
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE  # else it takes a mock of it for the real one
    if not torch.cuda.is_available():
        torch.cuda.current_device = _cpu  # type: ignore[assignment]
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # else it makes one
        MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts


def as_on_a_gpu() -> AbstractContextManager[object]:
    """Return a context in which Megatron Core's distributed optimizer can be built; where torch finds no GPU, it is
    built on the CPU."""
    return nullcontext() if torch.cuda.is_available() else _AsOnAGpu()


class _AsOnAGpu(TorchFunctionMode):
    """Makes tensors on the CPU where the device is given as ``cuda``, and names types of tensors as on a GPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = _cpu()
        result = function(*args, **named)
        return (
            result.replace("torch.", "torch.cuda.") if function is Tensor.type and isinstance(result, str) else result
        )


def _given_group(group: Any, *more: Any, **named: Any) -> Any:
    return _default_group(group, *more, **named) if group is None else group


def _counts(self: MoEAlltoAllTokenDispatcher, _: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Give collectives the numbers of tokens as the type they want; nothing is on a GPU."""
    for name in ("input_splits", "output_splits"):
        if isinstance(counts := getattr(self, name), Tensor):
            setattr(self, name, counts.numpy())
    return tokens_per_expert


def _cpu() -> torch.device:
    return torch.device("cpu")
