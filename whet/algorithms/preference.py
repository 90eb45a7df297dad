"""What the algorithms that learn from judged rows have in common: one loss, measured from a frozen reference, whose
log-probs are computed in each step or once."""

from typing import Literal

from pydantic import model_validator

from whet.algorithms.base import POLICY, Algorithm, Role
from whet.algorithms.parts import AnyLoss


class PreferenceAlgorithm(Algorithm):
    """A policy and, where its loss asks for one, a reference: the model that the run started from."""

    loss: AnyLoss
    """What is minimised."""
    reference: Literal["live", "cached"] = "live"
    """``live``: the reference stays in memory and scores each step. ``cached``: it scores the run's rows before the
    first step, into ``reference.safetensors`` in the run folder, and is let go."""

    @model_validator(mode="after")
    def _reads_what_it_caches(self) -> "PreferenceAlgorithm":
        if self.reference == "cached" and "reference_logprobs" not in self.reads:
            raise ValueError("reference = cached, but algorithm.loss has no reference; leave it out")
        return self

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY, caches_reference=self.reference == "cached")}
