"""SwanLab. Offline by default: needs no network and no login, and sends nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from whet.base.extras import extra
from whet.metrics.sinks.tracker import COLUMNS, TrackedRun, Tracker, TrackerConfig

if TYPE_CHECKING:
    import swanlab


class SwanlabSink(TrackerConfig):
    """One experiment per run folder, even when it is resumed. Upload offline ones with ``swanlab sync
    FOLDER/swanlog/*``."""

    label: ClassVar[str] = "swanlab"

    project: str = "whet"
    workspace: str | None = None
    name: str | None = None
    """Default: the name of the run folder."""
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online", "local", "disabled"] = "offline"

    def load(self) -> None:
        with extra("swanlab", "the sink swanlab"):
            import swanlab  # noqa: F401

    def begin(self, run: TrackedRun) -> Tracker:
        import swanlab

        opened = swanlab.init(
            mode=self.mode,
            log_dir=str(run.folder / "swanlog"),
            project=self.project,
            workspace=self.workspace,
            name=self.name or run.name,
            tags=list(self.tags),
            id=run.id,
            resume="allow",
            config=dict(run.recipe),
        )
        return _Writer(opened, run.id)


class _Writer(Tracker):
    def __init__(self, run: "swanlab.Run", identity: str) -> None:
        self._run, self.id = run, identity

    def log(self, step: int, values: Mapping[str, float], rollouts: list[list[object]]) -> None:
        import swanlab

        self._run.log(dict(values), step=step)
        if rollouts:
            table = swanlab.echarts.Table()
            table.add(list(COLUMNS), rollouts)
            self._run.log({"rollouts": table}, step=step)

    def close(self, complete: bool) -> None:
        self._run.finish(state="success" if complete else "aborted")
