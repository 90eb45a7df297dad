"""What the algorithms that learn from judged rows have in common: one loss, measured from a frozen reference, whose
log-probs are computed in each step or once."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import model_validator

from whet.algorithms.base import Algorithm
from whet.config import Component
from whet.losses.registry import LOSSES

if TYPE_CHECKING:
    from whet.losses.base import Loss


class PreferenceAlgorithm(Algorithm):
    """A policy and, where its loss asks for one, a reference: the model that the run started from."""

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")]
    reference: Literal["live", "cached"] = "live"
    """``live``: the reference stays in memory and scores each step. ``cached``: it scores the run's rows before the
    first step, into ``reference.safetensors`` in the run folder, and is let go."""

    @model_validator(mode="after")
    def _reads_what_it_caches(self) -> "PreferenceAlgorithm":
        if self.caches_reference and "reference_logprobs" not in self.needs:
            raise ValueError("reference = cached, but algorithm.loss has no reference; leave it out")
        return self

    @property
    def caches_reference(self) -> bool:
        return self.reference == "cached"

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss}
