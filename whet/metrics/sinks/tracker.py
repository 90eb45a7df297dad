"""Trackers: services that keep the curves of many runs. A thread follows ``metrics.jsonl`` and sends each finished step
once, so that a tracker that is slow, offline or broken delays nothing and gets the steps that it missed later.

                  metrics.jsonl ──► Follower (a thread) ──► Tracker ──► W&B, MLflow, trackio, SwanLab
  rollouts/step-000012.jsonl ────────┘      │
                                            └──► trackers/NAME.json: the run's id there, and the last step sent
"""

import json
import logging
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from whet.base.addresses import hidden
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_path
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value, numbers
from whet.metrics.sinks.jsonl import FILE, finished_steps

log = logging.getLogger(__name__)

_LONGEST_TEXT = 10_000  # characters of a cell
_ATTACHED = ("recipe.yaml", "lineage.json")
COLUMNS = ("task", "sample", "prompt", "answer", "reward", "advantage", "tokens", "status")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker is to show it."""

    folder: Path
    name: str
    id: str  # chosen by this package; a tracker that chooses ids itself reports its own
    resumed: bool  # the tracker has this run already, from before a resume
    recipe: Mapping[str, object]  # plain data


class Tracker(ABC):
    """A run that a tracker keeps. All methods are called by one thread, may block, and may raise any exception."""

    id: str

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], rollouts: list[list[object]]) -> None:
        """Send a step: its metrics, and rows of ``COLUMNS`` (none, if nothing was recorded)."""

    def attach(self, files: list[Path]) -> None:  # noqa: B027
        """Send the recipe and the lineage of the run, where the tracker keeps files. By default nothing."""

    @abstractmethod
    def close(self, complete: bool) -> None:
        """Send what is buffered. ``complete``: all steps of the recipe were sent."""


class TrackerConfig(SinkConfig, ABC):
    """Base of the sinks that are trackers."""

    label: ClassVar[str]  # also the name of its extra

    rollouts: int = Field(16, ge=0)
    """The rollouts of a recorded step (``rollouts.record_every``) that are sent as a table; 0 for none."""
    deadline: float = Field(30.0, gt=0)
    """Seconds that the end of a run waits for the tracker."""

    @abstractmethod
    def load(self) -> None:
        """Import the package. Raises ``MissingExtraError`` where it is missing, ``ConfigError`` for wrong settings."""

    @abstractmethod
    def begin(self, run: TrackedRun) -> Tracker:
        """Open the run in the tracker: a new one or, where the tracker has it already, the same one."""

    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> Sink:
        self.load()
        return Follower(self, folder, recipe, resuming=resume_step is not None)


class Follower(Sink):
    """Sends the finished steps of a run folder to a tracker, in a thread."""

    def __init__(self, config: TrackerConfig, folder: Path, recipe: JsonObject, resuming: bool) -> None:
        self._config, self._folder, self._recipe = config, folder, recipe
        self._state = folder / "trackers" / f"{config.label}.json"
        self._id, self._sent = _read_state(self._state) if resuming else (None, -1)
        self._offset = 0  # in metrics.jsonl: no step before it is still to be sent
        self._warned = self._abandoned = False
        self._finished = queue.SimpleQueue[int | None]()
        self._thread = threading.Thread(target=self._follow, name=f"tracker-{config.label}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        """Do nothing: the values are read from ``metrics.jsonl`` once the step is finished."""

    def finish_step(self, step: int) -> None:
        self._finished.put(step)

    def close(self) -> None:
        """Wait for the tracker until the deadline."""
        self._finished.put(None)
        self._thread.join(self._config.deadline)
        self._abandoned = self._thread.is_alive()
        if self._abandoned:
            text = "%s did not answer within %g s (sinks: deadline); %s and `whet resume` have the steps that it lacks"
            log.warning(text, self._config.label, self._config.deadline, FILE)

    def _follow(self) -> None:
        tracker, last, step = None, self._sent, self._finished.get()
        while step is not None and not self._abandoned:
            try:
                tracker = tracker or self._begin()
                for number, values in self._unsent(step):
                    if self._abandoned:
                        return
                    tracker.log(number, values, self._rollouts(number))
                    self._save(tracker.id, number)
                if self._warned:
                    log.info("%s answers again and has all steps up to %d", self._config.label, step)
                    self._warned = False
            except Exception as error:
                self._warn(error)
            last, step = step, self._finished.get()
        if tracker is not None and not self._abandoned:
            try:
                if files := [path for name in _ATTACHED if (path := self._folder / name).is_file()]:
                    tracker.attach(files)
                tracker.close(complete=self._sent == last and last >= int(self._recipe.get("steps") or 0))
            except Exception as error:
                self._warn(error)

    def _begin(self) -> Tracker:
        run = TrackedRun(
            folder=self._folder,
            name=self._folder.resolve().name,
            id=self._id or uuid.uuid4().hex[:16],
            resumed=self._id is not None,
            recipe=self._recipe,
        )
        tracker = self._config.begin(run)
        self._save(tracker.id, self._sent)
        return tracker

    def _unsent(self, until: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the steps up to ``until`` that were not sent, with all their metrics."""
        with (self._folder / FILE).open("rb") as file:
            file.seek(self._offset)
            for step, values, end in finished_steps(file):
                if step > until:
                    return
                if step > self._sent and (plotted := numbers(values)):
                    yield step, plotted
                self._offset = end

    def _rollouts(self, step: int) -> list[list[object]]:
        if not self._config.rollouts or not rollout_path(self._folder, step).exists():
            return []
        records = islice(read_rollouts(self._folder, step), self._config.rollouts)
        return [_row(record) for record in records]

    def _save(self, identity: str, sent: int) -> None:
        self._id, self._sent = identity, sent
        self._state.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._state, json.dumps({"id": identity, "sent": sent}).encode())

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            text = "%s does not take the metrics of this run: %s. It gets them when it answers; %s has them all"
            why = hidden(str(error)).rstrip(".") or type(error).__name__  # MLflow's errors repeat its address
            log.warning(text, self._config.label, why, FILE)
        self._warned = True


def _row(record: RolloutRecord) -> list[object]:
    """Return the values of ``COLUMNS``."""
    texts = (record.prompt[:_LONGEST_TEXT], record.answer[:_LONGEST_TEXT])
    return [record.task, record.sample, *texts, record.reward, record.advantage, len(record.tokens), record.status]


def _read_state(path: Path) -> tuple[str | None, int]:
    """Return the id of a run in its tracker and the last step that was sent; (None, -1) for a new one."""
    try:
        state = json.loads(path.read_text())
        return str(state["id"]), int(state["sent"])
    except FileNotFoundError:
        return None, -1
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s): the tracker gets this run as a new one", path, error)
        return None, -1
