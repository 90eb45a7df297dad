"""The types of an algorithm's parts that a recipe chooses by name, or by the dotted path of a class of one's own."""

from typing import Annotated

from whet.algorithms.advantage import Advantage
from whet.algorithms.registry import ADVANTAGES
from whet.config import Component
from whet.losses.base import Loss
from whet.losses.registry import LOSSES
from whet.rollouts.filters import FILTERS, Filter

AnyLoss = Annotated[Loss, Component(LOSSES)]
AnyAdvantage = Annotated[Advantage, Component(ADVANTAGES)]
AnyFilter = Annotated[Filter, Component(FILTERS)]
