"""The timeline of a run as a file in Chrome's trace format, which Perfetto and chrome://tracing open: steps with their
phases, episodes, and curves. It is written line by line, so that memory does not grow with the run."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from whet.base.errors import DataError
from whet.base.files import error_context
from whet.base.strict_json import JsonObject
from whet.metrics.clock import read_played
from whet.metrics.sinks.jsonl import FILE, finished_steps
from whet.show.metric_catalog import phases

_LOOP, _EPISODES = 1, 2  # the processes of the trace
_CURVES = ("reward/mean", "evaluation/accuracy", "loss", "tokens/goodput", "idle/learner", "idle/generator")
_Event = dict[str, Any]


def write_trace(run: Path, out: Path) -> tuple[int, int]:
    """Write the timeline of a run folder to a new file, compressed if it is called ``*.gz``. Return the numbers of
    steps and episodes. Raises ``DataError`` if the run has no step or the file exists."""
    if not (run / FILE).exists():
        raise DataError(f"{run} has no {FILE}: no step of this run has ended yet")
    if out.exists():
        raise DataError(f"{out} exists; name a new file")
    counts = {_LOOP: 0, _EPISODES: 0}
    partial = out.with_name(out.name + ".partial")
    with error_context(out):
        try:
            with _opened(partial, out.suffix == ".gz") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                file.write(json.dumps(_name(_LOOP, "training")))
                for event in _events(run):
                    counts[event["pid"]] += event.get("cat") in ("step", "episode")
                    file.write(",\n" + json.dumps(event))
                file.write("\n]}\n")
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    return counts[_LOOP], counts[_EPISODES]


def _events(run: Path) -> Iterator[_Event]:
    yield _name(_EPISODES, "episodes")
    with (run / FILE).open("rb") as file:
        for step, values, _ in finished_steps(file):
            yield from _step(step, values)
    for step, played in read_played(run):
        facts = {"step": step, "status": played.status, "tokens": played.tokens}
        yield _slice(_EPISODES, played.lane, "episode", played.name, played.began, played.seconds, facts)


def _step(step: int, values: JsonObject) -> Iterator[_Event]:
    """Yield a step, its phases one after the other (a phase that came several times is one slice), and its curves."""
    end, seconds = values.get("time/written", 0.0), values.get("time/step")
    for name in _CURVES:
        if name in values:
            yield {"ph": "C", "pid": _LOOP, "name": name, "ts": _micro(end), "args": {"value": values[name]}}
    if seconds is None:  # the evaluation before the first step
        return
    yield _slice(_LOOP, 0, "step", f"step {step}", end - seconds, seconds, {})
    began = end - seconds
    for name, part in phases(values).items():
        yield _slice(_LOOP, 1, "phase", name, began, part, {})
        began += part


def _slice(process: int, lane: int, kind: str, name: str, began: float, seconds: float, facts: _Event) -> _Event:
    times = {"ts": _micro(began), "dur": _micro(seconds)}
    return {"ph": "X", "pid": process, "tid": lane, "cat": kind, "name": name, **times, "args": facts}


def _name(process: int, name: str) -> _Event:
    return {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)


def _opened(path: Path, compressed: bool) -> IO[str]:
    return cast(IO[str], gzip.open(path, "wt")) if compressed else path.open("w", encoding="utf-8")
