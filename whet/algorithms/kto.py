"""KTO (arXiv 2402.01306): learns from single replies marked good or bad, without pairs. A good one becomes likelier and
a bad one less likely than under the reference, the less so the further they are from the reference point already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from whet.algorithms.kto_pairs import mismatched
from whet.algorithms.parts import AnyLoss
from whet.algorithms.preference import PreferenceAlgorithm
from whet.core.batch import Batch
from whet.core.types import Group, Weighting
from whet.data.base import Data
from whet.data.rows import LabelledRows
from whet.losses.base import Unit
from whet.losses.preference import KTOLoss
from whet.metrics import Metrics

if TYPE_CHECKING:
    from whet.learner.base import Scorer


class KTO(PreferenceAlgorithm):
    """The reference point is KL(policy || reference), estimated over each whole step on mismatched replies."""

    takes: ClassVar[tuple[type[Data], ...]] = (LabelledRows,)
    units: ClassVar[tuple[Unit, ...]] = ("sequence",)

    loss: AnyLoss = KTOLoss()
    """Its weights balance good and bad rows: ``desirable_weight``, ``undesirable_weight``."""
    weighting: Weighting = "sequence"
    """A token's share of a step."""

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"reference_point"}) & self.loss.reads

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        """Fill also the reference point, the same for every row: max(0, mean of lp - lp_ref), 0 for a single row."""
        metrics = await super().prepare(batch, groups, learners)
        if not self.fills:
            return metrics
        wrong, point = mismatched(batch), batch.reward.new_zeros(())
        if wrong.sequences:
            said = await learners["policy"].score(wrong, {"logprobs", "reference_logprobs"})
            gains = wrong.per_sequence(said["logprobs"] - said["reference_logprobs"])
            point = gains.double().mean().clamp(min=0)
        batch.fill("reference_point", point.expand(batch.sequences), axis="sequence")
        return metrics.mean("preference/reference_point", point.item())
