"""Weights & Biases. Offline by default: needs no network and no login, and sends nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from whet.base.errors import WhetError
from whet.base.extras import extra
from whet.metrics.sinks.tracker import COLUMNS, TrackedRun, Tracker, TrackerConfig

if TYPE_CHECKING:
    import wandb


class WandbSink(TrackerConfig):
    """One W&B run per run folder, even when it is resumed. Upload offline runs with ``wandb sync FOLDER/wandb/*``."""

    label: ClassVar[str] = "wandb"

    project: str = "whet"
    entity: str | None = None
    name: str | None = None
    """Default: the name of the run folder."""
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online", "disabled"] = "offline"

    def load(self) -> None:
        with extra("wandb", "the sink wandb"):
            import wandb  # noqa: F401

    def begin(self, run: TrackedRun) -> Tracker:
        import wandb

        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        try:
            opened = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.name or run.name,
                tags=list(self.tags),
                mode=self.mode,
                dir=str(run.folder),
                id=run.id,
                resume="allow" if self.mode == "online" else None,
                config=dict(run.recipe),
                settings=wandb.Settings(**quiet, init_timeout=self.deadline),
            )
        except wandb.Error as error:
            raise WhetError(f"{error}; run `wandb login`, or set the sink's mode to offline") from error
        # W&B's own counter would number the calls; the step is the axis.
        opened.define_metric("step")
        opened.define_metric("*", step_metric="step")
        return _Writer(opened, run.id)


class _Writer(Tracker):
    def __init__(self, run: "wandb.Run", identity: str) -> None:
        self._run, self.id = run, identity

    def log(self, step: int, values: Mapping[str, float], rollouts: list[list[object]]) -> None:
        import wandb

        table = {"rollouts": wandb.Table(columns=list(COLUMNS), data=rollouts)} if rollouts else {}
        self._run.log({**values, **table, "step": step})

    def attach(self, files: list[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self.id}", type="lineage")
        for path in files:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)
