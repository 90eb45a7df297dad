"""Signs of life of long operations, in a log and in a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import finished, program_fork
from tests.toy import toy_recipe, write_recipe
from whet import __version__
from whet.base.progress import Progress
from whet.show.heartbeat import Heartbeat


def test_a_line_is_due_only_where_nothing_was_printed_for_a_while() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    heartbeat = Heartbeat(progress=progress, every=20.0, stream=io.StringIO())
    progress.begin("evaluating")
    progress.where = "step 0/20"
    assert heartbeat.line(19.0) is None
    now[0] = 21.0
    line = heartbeat.line(21.0)
    assert line is not None
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 0/20 evaluating: 20 s so far", line)
    progress.mark_printed()
    assert heartbeat.line(40.0) is None
    assert heartbeat.line(42.0) is not None
    progress.draw(True)  # a live display shows it
    assert heartbeat.line(1000.0) is None


def test_the_first_line_comes_before_anything_else_and_further_lines_while_the_caller_waits() -> None:
    stream, progress = io.StringIO(), Progress()
    with Heartbeat("toy, 3 steps", stream, progress, every=0.0):
        assert stream.getvalue() == f"whet {__version__}: toy, 3 steps: loading\n"
        ends = time.monotonic() + 60
        while "so far" not in stream.getvalue() and time.monotonic() < ends:
            time.sleep(0.05)
    assert re.search(r"loading: \d+ s so far", stream.getvalue())


def test_a_closed_stream_does_not_matter() -> None:
    stream = io.StringIO()
    with Heartbeat("toy", stream, Progress(), every=0.0) as heartbeat:
        stream.close()
        heartbeat.say("unseen")


EVERY_PHASE = """
from whet.base.progress import Progress
from whet.cli import main
from whet.show.heartbeat import Heartbeat

heartbeat = Heartbeat(every=0.0)

def say_after(method):
    def both(progress, activity, *args):
        done = method(progress, activity, *args)
        if activity != "loading":  # comes before the first line
            heartbeat.say(heartbeat.line(progress.now()))
        return done
    return both

Progress.begin, Progress.count = say_after(Progress.begin), say_after(Progress.count)
main(["train", "toy.yaml", "sinks=[console,jsonl]", "--folder", "run"])
"""


def test_every_phase_of_a_run_has_a_line_in_a_log(tiny_model: Path, tmp_path: Path) -> None:
    """The line of each phase says what it counts. It is printed as the phase begins, because a phase of the toy may be
    over before the thread that prints such lines gets a turn."""
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=2))
    done = finished(program_fork(EVERY_PHASE, folder=tmp_path), 300)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == f"whet {__version__}: toy, 2 steps, into run: loading"
    text = "\n".join(lines)
    for words in ("loading the model", "evaluating: ", "of 4 answers", "sampling: ", "of 12 answers"):
        assert words in text, words
    assert re.search(r"\d\d:\d\d:\d\d step 1/2 learning: ", text)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"whet {__version__}" in log
    assert re.search(r"step 2 of 2 took \d", log)


@pytest.mark.slow
def test_a_terminal_is_not_blank_while_things_are_imported(tiny_model: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "whet", "train", "toy.yaml", "sinks=[console,jsonl]"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    try:
        while chunk := os.read(master, 65536):
            said += chunk
    except OSError:  # the error of a closed terminal
        pass
    assert process.wait(timeout=300) == 0
    text = said.decode()
    assert text.index("loading") < text.index("─") or "loading" in text.partition("─")[0]
    assert "\x1b[?25h" in text.rpartition("\x1b[?25l")[2]  # the cursor is back
