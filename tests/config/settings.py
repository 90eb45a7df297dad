"""A small recipe with each kind of field that the loading tests need."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.config import Component, Config


class Fruit(StrEnum):
    APPLE = "apple"
    PEAR = "pear"


class Optimizer(Config):
    """An optimizer."""

    lr: float = Field(default=1e-6, gt=0, description="Learning rate.")
    beta: float = 0.9
    """Decay of the first moment."""
    warmup: int = 3
    """Steps until the full rate."""


class Loss(Config):
    """Base of the losses."""


class Clip(Loss):
    """A clipped loss."""

    high: float = 0.2
    layers: tuple[int, ...] = (1, 2)


class Pair(Loss):
    """A loss over pairs."""

    margin: float = 1.0
    reduce: Literal["mean", "sum"] = "mean"


class Named(Loss):
    """A loss with names."""

    names: dict[str, int] = {"usual": 0}  # noqa: RUF012


HERE = "tests.config.settings"
LOSSES = {"clip": f"{HERE}:Clip", "pair": f"{HERE}:Pair", "named": f"{HERE}:Named"}
AnyLoss = Annotated[Loss, Component(LOSSES)]


class Settings(Config):
    description: str = ""
    name: str | None = None
    steps: int = Field(default=10, ge=1)
    optimizer: Optimizer = Optimizer(lr=1e-3)
    loss: AnyLoss = Field(default="clip")
    extra: AnyLoss | None = None
    losses: tuple[AnyLoss, ...] = (Pair(margin=4.0),)
    roles: dict[str, AnyLoss] = {}  # noqa: RUF012
    columns: dict[str, str] = {"prompt": "question"}  # noqa: RUF012
    kl: float | Literal["auto"] = "auto"
    shuffle: bool = True
    folder: Path = Path("data")
    fruit: Fruit = Fruit.APPLE
    sizes: tuple[int, int] = (1, 2)
    numbers: dict[str, float] = {}  # noqa: RUF012

    @model_validator(mode="after")
    def _steps_outlast_the_warmup(self) -> "Settings":
        if self.steps < self.optimizer.warmup:
            raise ValueError(f"steps ({self.steps}) is less than optimizer.warmup ({self.optimizer.warmup})")
        return self


class Required(Config):
    steps: int
