"""Keeps the groups that a run trained on, and replays them: a source that returns the same groups again, for
bit-identical updates without a generator. This also reproduces asynchronous runs, in which timing decided which groups
were in a step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic_core import PydanticSerializationError, to_jsonable_python

from whet.base.errors import DataError
from whet.base.files import replacing
from whet.base.strict_json import JsonObject
from whet.core.types import Episode, Group, Task
from whet.metrics import Metrics
from whet.metrics.clock import Timing

_FOLDER = "groups"  # in the run folder


def keep_groups(folder: Path, step: int, groups: list[Group]) -> None:
    """Write the groups of a step: tokens, log-probs, rewards, versions."""
    with replacing(_path(folder, step)) as staging, staging.open("w", encoding="utf-8") as file:
        for number, group in enumerate(groups):  # one at a time, because their JSON is larger than they are
            file.write(("[" if number == 0 else ", ") + json.dumps(_saved(group)))
        file.write("]" if groups else "[]")


def _saved(group: Group) -> dict[str, object]:
    try:
        task = to_jsonable_python(replace(group.task, data=group.task.columns))
    except (PydanticSerializationError, ValueError) as problem:  # the second for data that contain themselves
        raise DataError(f"task {group.task.uid!r}: its data must be values that JSON can hold: {problem}") from None
    return {"uid": group.uid, "task": task, "episodes": [episode.to_json() for episode in group.episodes]}


def kept_groups(folder: Path, step: int) -> list[Group]:
    """Return the groups of a step; the data of their tasks are dicts of the columns. Raises ``DataError`` if they were
    not kept or can't be read."""
    path = _path(folder, step)
    try:
        return [
            Group(saved["uid"], Task(**saved["task"]), [Episode.from_json(episode) for episode in saved["episodes"]])
            for saved in json.loads(path.read_text("utf-8"))
        ]
    except FileNotFoundError:
        raise DataError(
            f"there is no {path}: that run ended before this step, or was made without rollouts.keep_groups"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} can't be read as kept groups: {error}") from error


def drop_groups_after(folder: Path, step: int) -> None:
    """Delete the groups of the steps that a resumed run will repeat."""
    for path in (folder / _FOLDER).glob("step-*.json"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / _FOLDER / f"step-{step:06d}.json"


class KeptSource:
    """Returns the groups that the run in ``folder`` has kept, step by step. See ``Source``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to close."""

    async def next_groups(self) -> list[Group]:
        return kept_groups(self.folder, self.version + 1)

    async def published(self, version: int) -> None:
        self.version = version

    def tally(self) -> tuple[Metrics, Timing]:
        return Metrics(), Timing()

    def state(self) -> JsonObject:
        """The step determines the state."""
        return {}

    def load_state(self, state: dict[str, object], version: int) -> None:
        self.version = version
