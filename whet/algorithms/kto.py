"""KTO (arXiv 2402.01306): learns from single replies marked good or bad, without pairs. A good one becomes likelier and
a bad one less likely than under the reference, the less so the further they are from the reference point already."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.preference import PreferenceAlgorithm
from whet.config import Component
from whet.data.base import Data
from whet.data.examples import LabelledRows
from whet.losses.base import Unit
from whet.losses.registry import LOSSES
from whet.metrics import Metrics
from whet.types import Group, Weighting

if TYPE_CHECKING:
    from whet.batch import Batch
    from whet.learner.base import Scorer


class KTO(PreferenceAlgorithm):
    """The reference point is KL(policy || reference), estimated over each whole step on mismatched replies."""

    takes: ClassVar[tuple[type[Data], ...]] = (LabelledRows,)
    units: ClassVar[tuple[Unit, ...]] = ("sequence",)

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="kto")
    """Its weights balance good and bad rows: ``desirable_weight``, ``undesirable_weight``."""
    weighting: Weighting = "sequence"

    @property
    def fills(self) -> frozenset[str]:
        return super().fills | {"reference_point"}

    async def consult(self, batch: "Batch", groups: Sequence[Group], learners: "Mapping[str, Scorer]") -> None:
        """The same reference point on every row: max(0, mean of lp - lp_ref), 0 for a single row."""
        from whet.algorithms.mismatched import mismatched

        wrong, point = mismatched(batch), batch.reward.new_zeros(())
        if wrong.sequences:
            said = await learners["policy"].score(wrong, {"logprobs", "reference_logprobs"})
            gains = wrong.per_sequence(said["logprobs"] - said["reference_logprobs"])
            point = gains.double().mean().clamp(min=0)
        batch.fill("reference_point", point.expand(batch.sequences), axis="sequence")

    def report(self, batch: "Batch") -> Metrics:
        return Metrics().mean("preference/reference_point", batch.column("reference_point").mean().item())
