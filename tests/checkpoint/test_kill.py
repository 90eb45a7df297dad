"""A process that is killed at any moment of a save leaves a run that can be resumed."""

import asyncio
import json
import re
import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whet
from tests.ancestor import Ancestor
from tests.checkpoint.writer import Save, assert_intact, save_all
from whet.base.errors import ConfigError
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.crash_points import CRASH_POINTS, VARIABLE, crash_point
from whet.checkpoint.store import CheckpointStore

POINTS = [name for name in CRASH_POINTS if name.startswith("checkpoint.")]
AFTER_POINTER = POINTS[POINTS.index("checkpoint.before_prune") :]  # here `latest` names the new checkpoint


@cache
def writer() -> Ancestor:
    return Ancestor("import tests.checkpoint.writer\n", PYTHONPATH=str(Path(__file__).parents[2]))


def run_writer(folder: Path, saves: list[Save], config: CheckpointConfig, crash_at: str) -> int:
    """Save in another process; return its exit code."""
    arguments = str(folder), json.dumps(saves), config.model_dump_json()
    code = "from tests.checkpoint.writer import main\nmain()"
    return writer().run(code, *arguments, folder=folder, **{VARIABLE: crash_at}).returncode


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("keep_last", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_newest_published_checkpoint_intact(
    tmp_path: Path, point: str, keep_last: int
) -> None:
    config = CheckpointConfig(keep_last=keep_last, keep_best=0)
    replacing = point == "checkpoint.mid_replace"
    saves: list[Save] = [(10, 0.1, 1), (20, 0.2, 2), (20 if replacing else 30, 0.3, 3), (40, None, 4)]
    visit = 1 if replacing or (point == "checkpoint.mid_prune" and keep_last == 2) else 3
    if point == "checkpoint.mid_prune" and keep_last == 1:
        visit = 2
    assert run_writer(tmp_path, saves, config, f"{point}:{visit}") == -signal.SIGKILL

    store = CheckpointStore(tmp_path, config)
    store.clean()
    assert hidden_files(tmp_path) == []
    checkpoint = store.load_latest()
    assert checkpoint is not None
    assert_intact(checkpoint)
    assert (checkpoint.step, checkpoint.state["seed"]) == ((30, 3) if point in AFTER_POINTER else (20, 2))
    for step in store.steps():
        assert_intact(store.load(step))

    asyncio.run(save_all(tmp_path, [(50, None, 5)], config))
    checkpoint = store.load_latest()
    assert checkpoint is not None
    assert checkpoint.step == 50
    assert len(store.steps()) <= keep_last
    assert hidden_files(tmp_path) == []


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_in_the_first_save_leaves_no_checkpoint_or_an_intact_one(tmp_path: Path, point: str) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=0)
    saves: list[Save] = [(1, None, 1), (1, None, 2)] if point == "checkpoint.mid_replace" else [(1, None, 1)]
    if point == "checkpoint.mid_prune":
        saves.append((2, None, 2))
    assert run_writer(tmp_path, saves, config, point) == -signal.SIGKILL
    store = CheckpointStore(tmp_path, config)
    store.clean()
    checkpoint = store.load_latest()
    published = POINTS.index(point) >= POINTS.index("checkpoint.mid_replace")
    assert (checkpoint is not None) == published
    if checkpoint is not None:
        assert_intact(checkpoint)


Action = tuple[str, int, float | None]
ACTIONS = st.tuples(
    st.sampled_from([*POINTS, "save", "save", "save"]), st.integers(1, 4), st.sampled_from([None, 0.1, 0.2, 0.3])
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=1, max_size=6), keep_last=st.integers(1, 2), keep_best=st.integers(0, 1))
def test_any_sequence_of_saves_and_kills_matches_a_model(
    tmp_path_factory: pytest.TempPathFactory, actions: list[Action], keep_last: int, keep_best: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    config = CheckpointConfig(keep_last=keep_last, keep_best=keep_best)
    published: dict[int, tuple[int, float | None]] = {}  # step -> seed, metric
    latest: int | None = None
    for seed, (action, step, metric) in enumerate(actions):
        code = run_writer(folder, [(step, metric, seed)], config, "" if action == "save" else action)
        died = code == -signal.SIGKILL
        assert died or code == 0
        reached = POINTS.index(action) if died else len(POINTS)
        if reached >= POINTS.index("checkpoint.after_rename"):
            published[step] = (seed, metric)
        if reached >= POINTS.index("checkpoint.before_prune"):
            latest = step

        store = CheckpointStore(folder, config)
        store.clean()
        stored = {s: store.load(s) for s in store.steps()}
        for s, checkpoint in stored.items():
            assert_intact(checkpoint)
            assert (checkpoint.state["seed"], checkpoint.metric) == published[s]
        last = store.load_latest()
        newest = latest if latest is not None else max(published, default=None)
        assert (last.step if last else None) == newest
        if not died:
            measured = {s: m for s, (_, m) in published.items() if m is not None}
            best = sorted(measured, key=lambda s: (measured[s], s), reverse=True)[:keep_best]
            kept = sorted((s for s in published if s <= step), reverse=True)[:keep_last]
            assert set(stored) == {*kept, *best, step}
        assert died or latest == step
        published = {s: published[s] for s in stored}


def test_a_crash_point_counts_its_visits(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=9)
    saves: list[Save] = [(step, None, step) for step in range(1, 6)]
    assert run_writer(tmp_path, saves, config, "checkpoint.before_rename:4") == -signal.SIGKILL
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]


def test_every_crash_point_is_registered_and_used_once() -> None:
    package = Path(whet.__file__).parent
    used = [
        name for file in package.rglob("*.py") for name in re.findall(r'crash_point\("([\w.]+)"\)', file.read_text())
    ]
    assert sorted(used) == sorted(CRASH_POINTS)


def test_an_unknown_crash_point_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        crash_point("checkpoint.nowhere")
    for wrong in ("checkpoint.nowhere", "step.updated:0", "step.updated:soon"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=r"step\.published"):
            crash_point("step.updated")
