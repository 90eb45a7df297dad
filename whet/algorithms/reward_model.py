"""Training a reward model: a scalar head at the last token of an answer learns to rank pairs (Bradley and Terry 1952;
as a reward model, arXiv 2203.02155) or, with ``loss: score_regression`` and scored rows, to give their scores."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from whet.algorithms.base import Algorithm, Head
from whet.config import Component
from whet.data.base import Data
from whet.data.examples import PreferenceRows, ScoredRows
from whet.losses.registry import LOSSES
from whet.types import Weighting

if TYPE_CHECKING:
    from whet.losses.base import Loss


class RewardModel(Algorithm):
    """One model with a scalar head, and no policy."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows, ScoredRows)
    heads: ClassVar[dict[str, Head]] = {"reward_model": "value"}

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="bradley_terry")
    """``bradley_terry`` for pairs, ``score_regression`` for scored rows."""
    weighting: Weighting = "group"

    @model_validator(mode="after")
    def _reads_the_head(self) -> "RewardModel":
        if self.loss.reads or self.loss.outputs != {"values"}:
            raise ValueError(
                "loss learns from more or other than the head's scores; bradley_terry or score_regression do"
            )
        return self

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"reward_model": self.loss}
