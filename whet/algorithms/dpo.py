"""Direct preference optimisation (arXiv 2305.18290) and its relatives by their loss: IPO, hinge and robust DPO
(``loss.form``), an SFT term (``loss.sft_weight``), SimPO and ORPO (``loss.type``). The frozen reference is the model
that the run started from; SimPO and ORPO need none."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.preference import PreferenceAlgorithm
from whet.config import Component
from whet.data.base import Data
from whet.data.examples import PreferenceRows
from whet.losses.base import Unit
from whet.losses.registry import LOSSES
from whet.types import Weighting


class DPO(PreferenceAlgorithm):
    """The chosen answer of each pair becomes likelier than the rejected one, measured from the reference."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows,)
    units: ClassVar[tuple[Unit, ...]] = ("group",)

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="dpo")
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    weighting: Weighting = "group"
