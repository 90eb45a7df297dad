"""When checkpoints are written and which are kept. Imports nothing heavy, since every recipe holds one of these."""

from typing import Literal

from pydantic import Field

from whet.config import Config


class CheckpointConfig(Config):
    """Settings of the checkpoint store."""

    every: int = Field(25, ge=0)
    """Steps between checkpoints; 0: only after the last step. A kill costs at most so many steps."""
    keep_last: int = Field(2, gt=0)
    """The newest checkpoints that are kept. With 2, a damaged newest one still leaves one to fall back to."""
    keep_best: int = Field(1, ge=0)
    """Checkpoints that are kept for their metric, whatever their age."""
    best_metric: str = "evaluation/accuracy"
    """What "best" is judged by. A checkpoint at whose step it was not measured is never the best."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller metric is better."""
    asynchronous: bool = False
    """Write while training goes on: it stops only until a copy is taken, which needs memory for weights and moments on
    the CPU. One at a time: the next one waits for the one before."""
    verify: bool = True
    """Compare the SHA-256 of every file when loading. False: only names and sizes."""

    def due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint is written after ``step`` of ``steps``."""
        return step == steps or (self.every > 0 and step % self.every == 0)
