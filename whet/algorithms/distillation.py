"""Distillation on given replies (arXiv 1503.02531, 2306.13649): at each place the student's distribution moves towards
the teacher's, over the teacher's likeliest tokens. Nothing is sampled."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.teachers import Taught
from whet.config import Component
from whet.data.base import Data
from whet.data.examples import SupervisedRows
from whet.losses.registry import LOSSES

if TYPE_CHECKING:
    from whet.losses.base import Loss


class Distillation(Taught):
    """A divergence between teachers and student on rows of text."""

    takes: ClassVar[tuple[type[Data], ...]] = (SupervisedRows,)

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="distillation")
    """Which divergence."""

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss}
