"""``episodes.jsonl`` of a run folder: when each episode was played. One line per episode, in the order of their ends.

Lines stay when a run is resumed: an episode that was played again took its time twice."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from whet.base.files import append
from whet.metrics.clock import Played

FILE = "episodes.jsonl"


def write_played(folder: Path, step: int, played: Iterable[Played]) -> None:
    """Append the episodes that ended in a step."""
    if lines := "".join(json.dumps({"step": step} | asdict(episode)) + "\n" for episode in played):
        append(folder / FILE, lines)


def read_played(folder: Path) -> Iterator[tuple[int, Played]]:
    """Yield the step and the times of each episode. Lines that a kill left incomplete are skipped; without a file
    nothing is yielded."""
    try:
        file = (folder / FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                values = json.loads(line)
                yield values.pop("step"), Played(**values)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
