"""Direct preference optimisation (arXiv 2305.18290) and its relatives by their loss: IPO, hinge and robust DPO
(``loss.form``), an SFT term (``loss.sft_weight``), SimPO and ORPO (``loss.type``). The frozen reference is the model
that the run started from; SimPO and ORPO need none."""

from typing import ClassVar

from whet.algorithms.parts import AnyLoss
from whet.algorithms.preference import PreferenceAlgorithm
from whet.core.types import Weighting
from whet.data.base import Data
from whet.data.rows import PreferenceRows
from whet.losses.base import Unit
from whet.losses.preference import DPOLoss


class DPO(PreferenceAlgorithm):
    """The chosen answer of each pair becomes likelier than the rejected one, measured from the reference."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows,)
    units: ClassVar[tuple[Unit, ...]] = ("group",)

    loss: AnyLoss = DPOLoss()
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    weighting: Weighting = "group"
    """A token's share of a step."""
