"""Advice for each part of a learner's work that gets no memory; see ``whet.base.memory``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from whet.base.memory import naming_memory
from whet.core.batch import Batch

_MORE_RANKS = "split the model over more ranks (parallel.fsdp); `whet plan` prints what a rank needs"


def loading(model: str, device: torch.device) -> AbstractContextManager[None]:
    """Name the model and its device if the block gets no memory."""
    return naming_memory(f"loading {model} onto {device}", _MORE_RANKS)


def computing(what: str, batches: Sequence[Batch]) -> AbstractContextManager[None]:
    """Name the pass and the size of its micro-batches if the block gets no memory."""
    return naming_memory(
        f"{what} micro-batches of up to {max(map(len, batches), default=0):,} tokens",
        f"lower learner.max_tokens or learner.pack_tokens, set learner.activation_checkpointing=true, or {_MORE_RANKS}",
    )


def optimizing(what: str) -> AbstractContextManager[None]:
    """Name the optimizer's work if the block gets no memory."""
    smaller = "set optimizer.moments=8bit, optimizer.type=adafactor or model.lora={}"
    return naming_memory(what, f"{smaller}, or {_MORE_RANKS}")
