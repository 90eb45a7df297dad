"""Weights & Biases. Offline by default: needs no network and no login, and sends nothing."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from whet.base.errors import WhetError
from whet.base.extras import extra
from whet.base.files import write_atomically
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value, numbers


class WandbSink(SinkConfig):
    """One W&B run per run folder, even when it is resumed. Upload offline runs with ``wandb sync FOLDER/wandb/*``."""

    project: str = "whet"
    entity: str | None = None
    name: str | None = None
    """Default: the name of the run folder."""
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online", "disabled"] = "offline"

    def open(self, folder: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> Sink:
        with extra("wandb", "the sink wandb"):
            import wandb
        folder.mkdir(parents=True, exist_ok=True)
        memory = folder / "wandb-run-id"  # so that a resumed run continues the same curve
        if resume_step is None or not memory.exists():
            write_atomically(memory, uuid.uuid4().hex[:8].encode())
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.name or folder.resolve().name,
                tags=list(self.tags),
                mode=self.mode,
                dir=str(folder),
                id=memory.read_text().strip(),
                resume="allow" if self.mode == "online" else None,
                config=dict(recipe),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.Error as error:
            raise WhetError(
                f"Weights & Biases did not start ({error}); run `wandb login`, or set the sink's mode to offline"
            ) from error
        # W&B's step counter can't go back, as a resumed run needs: use our own step as the axis.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return _Writer(run)


class _Writer(Sink):
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        self._run.log({**numbers(values), "step": step})

    def close(self) -> None:
        self._run.finish()
