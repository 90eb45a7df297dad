"""Training a reward model: a scalar head at the last token of an answer learns to rank pairs (Bradley and Terry 1952;
as a reward model, arXiv 2203.02155) or, with ``loss: score_regression`` and scored rows, to give their scores."""

from typing import ClassVar

from whet.algorithms.base import Algorithm, Role
from whet.algorithms.parts import AnyLoss
from whet.core.types import Weighting
from whet.data.base import Data
from whet.data.rows import PreferenceRows, ScoredRows
from whet.losses.reward_model import BradleyTerry


class RewardModel(Algorithm):
    """One model with a scalar head, and no policy."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows, ScoredRows)

    loss: AnyLoss = BradleyTerry()
    """``bradley_terry`` for pairs, ``score_regression`` for scored rows."""
    weighting: Weighting = "group"
    """A token's share of a step."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"reward_model": Role(loss=self.loss, head="value")}
