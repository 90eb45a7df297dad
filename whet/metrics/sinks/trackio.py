"""trackio: curves in a local database, shown by ``trackio show``, or in a Space of the Hugging Face Hub."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from whet.base.addresses import HttpAddress
from whet.base.extras import extra
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.tracker import COLUMNS, TrackedRun, Tracker, TrackerConfig

if TYPE_CHECKING:
    import trackio


class TrackioSink(TrackerConfig):
    """One run of a trackio project per run folder. Local unless ``space`` or ``server`` is set."""

    label: ClassVar[str] = "trackio"

    project: str = "whet"
    space: str | None = None
    """A Space of the Hub, as in ``me/curves``, which is made where it is missing; needs a login."""
    server: HttpAddress | None = None
    """The address of a trackio server. Its write token is read from ``$TRACKIO_WRITE_TOKEN``."""

    def load(self) -> None:
        with extra("trackio", "the sink trackio"):
            import trackio  # noqa: F401

    def begin(self, run: TrackedRun) -> Tracker:
        import trackio

        name = run.id if run.resumed else f"{run.name}-{run.id[:6]}"  # trackio finds a run by its name
        quiet: JsonObject = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        opened = trackio.init(
            project=self.project,
            name=name,
            space_id=self.space,
            server_url=self.server,
            config=dict(run.recipe),
            resume="allow" if run.resumed else "never",
            **quiet,
        )
        return _Writer(opened, name)


class _Writer(Tracker):
    def __init__(self, run: "trackio.Run", name: str) -> None:
        self._run, self.id = run, name

    def log(self, step: int, values: Mapping[str, float], rollouts: list[list[object]]) -> None:
        import trackio

        table = {"rollouts": trackio.Table(columns=list(COLUMNS), data=rollouts)} if rollouts else {}
        self._run.log({**values, **table}, step=step)

    def close(self, complete: bool) -> None:
        self._run.finish()
