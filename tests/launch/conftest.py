"""A working folder with launch profiles, and stand-ins for the schedulers."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import stub
from whet.cli import main
from whet.launch.schedulers import SCHEDULERS

PROFILES = """
[profiles.here]
kind = "local"

[profiles.box]
kind = "docker"
container = "whet:cpu"

[profiles.cluster]
kind = "slurm"
partition = "gpu"

[profiles.limited]
extends = "cluster"
time = "04:00:00"
save_before = "1h"

[profiles.pods]
kind = "kubernetes"
container = "whet:cuda"
folder = "FOLDER/shared"

[profiles.cloud]
kind = "skypilot"
folder = "FOLDER/bucket"
"""


class Schedulers:
    """The stand-ins' folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def clear(self, name: str) -> None:
        (self.folder / name).unlink()

    def calls(self) -> list[list[str]]:
        """Return the arguments of each call of whet."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, until: Callable[[], Any]) -> None:
        """Wait for something that happens sooner or later; the limit is far beyond any busy machine."""
        end = time.monotonic() + 120
        while not until():
            assert time.monotonic() < end, "this did not happen"
            time.sleep(0.05)


@pytest.fixture
def schedulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedulers]:
    stub.install(tmp_path / "bin")
    (tmp_path / "state").mkdir()
    (tmp_path / "work").mkdir()
    profiles = PROFILES.replace("FOLDER", str(tmp_path))
    setup = f'\nsetup = "PATH={tmp_path}/bin:$PATH"\nenvironment = {{STUB = "{tmp_path}/state"}}\nkind ='
    (tmp_path / "work" / "whet.toml").write_text(profiles.replace("\nkind =", setup))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for scheduler in SCHEDULERS.values():
        monkeypatch.setattr(type(scheduler), "poll", 0.1)
    there = Schedulers(tmp_path / "state")
    yield there
    there.set("finish", "0")
    (there.folder / "hold").unlink(missing_ok=True)


def whet(*words: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)
