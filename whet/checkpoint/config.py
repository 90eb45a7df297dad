"""The settings of checkpoints: when they are written and which are kept. Imports nothing heavy, because recipes contain
them."""

import re
from typing import Literal

from pydantic import Field, field_validator

from whet.base.addresses import check_no_password
from whet.config import Config

PASSWORD = "put it into an environment variable that fsspec reads, as in FSSPEC_SFTP_PASSWORD"


class CheckpointConfig(Config):
    """Settings of the checkpoint store."""

    every: int = Field(25, ge=0)
    """Steps between checkpoints; 0: only after the last step. A kill loses at most this many steps."""
    keep_last: int = Field(2, gt=0)
    """Number of newest checkpoints to keep. With 2, there is a fallback if the newest one is damaged."""
    keep_best: int = Field(1, ge=0)
    """Number of best checkpoints, by ``best_metric``, to keep regardless of their age."""
    best_metric: str = "evaluation/accuracy"
    """The metric that selects the best checkpoint. Checkpoints without a value of it are never the best."""
    mode: Literal["max", "min"] = "max"
    """``max`` if a larger metric is better, ``min`` if a smaller one is."""
    asynchronous: bool = False
    """Write checkpoints during training. Training stops only while weights and optimizer state are copied to CPU
    memory; one save runs at a time, and the next one waits for it."""
    verify: bool = True
    """Verify the SHA-256 of every file when loading; false: of JSON files, and of all others names and sizes."""

    before: float | None = Field(None, gt=0)
    """Save and end the run this long before Slurm ends its job: seconds, or ``10m``, ``1h``. The current step is
    finished first: allow time for one. None: only at SIGTERM."""

    mirror: str | None = None
    """A folder of runs at a URL of fsspec, as in ``s3://bucket/runs`` or ``file:///mnt/runs``: each checkpoint, with
    everything else that a resume needs, is copied to the folder with the run's name there."""
    mirror_deadline: float = Field(1800.0, gt=0)
    """Time for one copy with all its attempts: seconds, or ``30m``. Then the run warns, and continues without it."""

    @field_validator("mirror")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"{value} is not a URL; for a folder write file://{value if value[:1] == '/' else '/...'}")
        check_no_password(value or "", PASSWORD)
        return value

    @field_validator("before", "mirror_deadline", mode="before")
    @classmethod
    def _in_seconds(cls, value: object) -> object:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value)):
            return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return value

    def due(self, step: int, steps: int) -> bool:
        """Return True if a checkpoint is written after ``step`` of ``steps``."""
        return step == steps or (self.every > 0 and step % self.every == 0)
