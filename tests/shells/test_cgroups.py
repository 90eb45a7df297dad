"""Cgroups around local runtimes, in a stand-in of the system's folders, whose limits have no effect; and in the real
ones where this user may make any, without memory and processes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.contracts.fault_contract import eventually
from tests.contracts.runtime_contract import LIMITS, text
from whet.shells import cgroups
from whet.shells.cgroups import Cgroup, cgroup_of
from whet.shells.local import Local, LocalRuntime, _problem

isolated = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cgroups of a user: the run is in a scope, and the slice above it hands out memory and processes."""
    scope = tmp_path / "user.slice/app.slice/run.scope"
    scope.mkdir(parents=True)
    for folder, names in ((scope, ""), (scope.parent, "memory pids"), (tmp_path / "user.slice", "cpu memory pids")):
        (folder / "cgroup.subtree_control").write_text(names)
        (folder / "cgroup.procs").write_text("")
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/user.slice/app.slice/run.scope\n")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", own)
    monkeypatch.setattr(cgroups, "_ROUNDS", 1)  # folders with files can't be removed as cgroups are
    return scope.parent


def made(tree: Path) -> list[Path]:
    return sorted(tree.rglob("whet-*"))


@isolated
def test_a_runtime_is_in_a_cgroup_with_its_limits(tree: Path) -> None:
    runtime = Local(limits=LIMITS).open()
    assert isinstance(runtime, LocalRuntime)
    try:
        [place] = made(tree)
        assert place.parent == tree
        assert (place / "cgroup.procs").read_text() == str(runtime._child.process.pid)
        assert int((place / "memory.max").read_text()) == (256 + 4 * 4 + 64) << 20
        assert (place / "memory.swap.max").read_text() == "0"
        assert (place / "pids.max").read_text() == "24"
        assert text(runtime.run("echo alive")) == "alive\n"
    finally:
        runtime.close()
    assert (place / "cgroup.kill").read_text() == "1"


@isolated
def test_a_command_whose_process_the_kernel_killed_used_too_much_memory(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Local(limits=LIMITS).open()
    counts = iter([0, 0, 0, 2, 2, 2])  # before and after each command
    monkeypatch.setattr(Cgroup, "killed", property(lambda _: next(counts)))
    try:
        assert [runtime.run("kill -9 $$").ending for _ in range(3)] == ["exit", "memory", "exit"]
    finally:
        runtime.close()


def test_the_kernels_count_is_read(tree: Path) -> None:
    group = Cgroup(tree, {})
    assert group.killed == 0
    (group.path / "memory.events").write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\n")
    assert group.killed == 3


@pytest.mark.parametrize("what", ["not handed out", "only for another user", "version 1", "no folder", "can't be made"])
def test_without_a_cgroup_a_runtime_has_the_limits_inside(
    tree: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "not handed out":
        for folder in (tree, tree.parent):
            (folder / "cgroup.subtree_control").write_text("cpu memory")
    elif what == "only for another user":
        monkeypatch.setattr(cgroups.os, "access", lambda *_: False)
    elif what == "version 1":
        cgroups.OWN.write_text("4:memory:/user.slice/app.slice\n")
    elif what == "no folder":
        shutil.rmtree(tree)
    else:
        monkeypatch.setattr(cgroups.Path, "mkdir", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert cgroup_of(os.getpid(), LIMITS) is None
    assert not made(tree.parent)


def test_cgroups_of_killed_runs_are_removed_and_no_others(tree: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned, living = tree / f"whet-{ended.pid}-0", tree / f"whet-{os.getppid()}-0"
    for folder in (abandoned, living):
        folder.mkdir()
    assert cgroup_of(os.getpid(), LIMITS) is not None
    assert (abandoned.exists(), living.exists()) == (False, True)


def _real() -> Path | None:
    """Return the system's cgroups of version 2, if this user may make one."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(place, os.W_OK):
            return Path(place)
    return None


@pytest.mark.skipif(_real() is None, reason="this user may make no cgroups of version 2")
def test_real_cgroups_hold_a_process_and_its_children_and_end_them() -> None:
    parent = _real()
    assert parent is not None
    try:
        group = Cgroup(parent, {"cgroup.max.descendants": 0})
    except OSError as problem:
        pytest.skip(f"this user may make no cgroups: {problem}")
    shell = subprocess.Popen(["sh", "-c", "read line; sleep 600 & sleep 600"], stdin=subprocess.PIPE)
    try:
        group.add(shell.pid)
        assert shell.stdin is not None
        shell.stdin.write(b"go\n")
        shell.stdin.flush()
        assert eventually(lambda: len((group.path / "cgroup.procs").read_text().split()) == 3, 60.0)
        with pytest.raises(OSError):
            (group.path / "another").mkdir()
    finally:
        group.remove()
        shell.kill()
    assert shell.wait(60) == -9
    assert not group.path.exists()
    with pytest.raises(OSError):
        Cgroup(parent, {"no.such.limit": 1})
    assert not list(parent.glob(f"whet-{os.getpid()}-*"))
