"""Episodes of commands: what they are given, their answers, and their failures. No process outlives its episode."""

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contracts.fault_contract import eventually
from tests.endpoint.agents import first_episode
from tests.toy import Lowercase
from whet.config import SettingsError
from whet.core.types import Episode, Status
from whet.processes import keeper, loop_thread
from whet.processes.loop_thread import LoopThread
from whet.rollouts.sampling import Sampling
from whet.tasks.base import Address
from whet.tasks.command import Command
from whet.tasks.program import AgentTasks

SHELL = str(Path(__file__).parents[2] / "examples/agent.sh")
needs_curl = pytest.mark.skipif(not all(map(shutil.which, ("curl", "jq"))), reason="the script calls curl and jq")

CALL = """
import json, os, sys, urllib.request
def call():
    body = json.dumps({"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}).encode()
    key = os.environ["ANTHROPIC_API_KEY"]
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, {"x-api-key": key})
    return json.load(urllib.request.urlopen(request))["content"][0]["text"]
"""


def episode_of(*words: str, answer: str = "ok", seconds: float = 60.0, turns: int = 10, **settings: Any) -> Episode:
    tasks = AgentTasks(program=words, taskset=Lowercase(size=4), deadline=seconds, **settings)
    return first_episode(tasks, answer, Sampling(max_turns=turns, max_new_tokens=50))


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", CALL + code


@needs_curl
def test_a_shell_script_with_curl_is_trained_unchanged() -> None:
    episode = episode_of(SHELL, answer="aB")
    assert episode.status == Status.COMPLETED, episode.error
    assert (episode.reward, episode.scores) == (0.5, {"correct": 0.0})
    [branch] = episode.branches
    assert [span.trained for span in branch.spans] == [False, True, False, True]


@needs_curl
def test_a_refusal_that_the_script_prints_ends_the_episode_at_its_budget() -> None:
    episode = episode_of(SHELL, answer="aB", turns=1)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "turns", 0.0)


def test_a_command_gets_the_prompt_its_folder_and_its_environment(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("k")
    code = """
call()
assert sys.argv[1] == "say " + json.load(sys.stdin)[-1]["content"], sys.argv
assert os.environ["GREETING"] == "hi" and open("kept.txt").read() == "k"
open("kept.txt", "w").write("changed")
print("ab", end="\\n\\n")
"""
    episode = episode_of(*python(code), "say {prompt}", folder=str(tmp_path), environment={"GREETING": "hi"})
    assert (episode.status, episode.reward) == (Status.COMPLETED, 1.0), episode.error
    assert (tmp_path / "kept.txt").read_text() == "k", "an episode has a copy"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('done')", "the program ended without calling the model"),
        (
            "call(); print('so far'); sys.exit('broken tool')",
            "exited with status 1 for toy/train/0; its standard out",
        ),
        ("call(); sys.exit('broken tool')", "standard error ends: broken tool"),
        ("call(); os.kill(os.getpid(), 9)", "was killed by SIGKILL for toy/train/0; it printed nothing"),
        ("call(); print('x' * 2**21)", "printed more than 1,048,576 bytes"),
    ],
)
def test_a_failed_command_is_named_with_its_output_and_never_a_reward(code: str, problem: str) -> None:
    episode = episode_of(*python(code))
    assert episode.status == Status.FAILED
    assert problem in str(episode.error)
    assert episode.branches == []


def test_of_an_output_of_any_length_the_end_is_read() -> None:
    code = "os.ftruncate(1, 1 << 40); os.lseek(1, 0, os.SEEK_END); print('the end', flush=True); sys.exit(3)"
    assert "exited with status 3 for toy/train/0; its standard output ends: " in str(episode_of(*python(code)).error)


def test_processes_that_left_the_session_or_cleared_their_variables_end_with_the_episode(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    code = f"""
import subprocess, time
call()
for number in range(3):
    cleared = ["env", "-i"] if number == 2 else []
    child = subprocess.Popen([*cleared, "setsid", "--fork", "sh", "-c", "echo $$ >> {note}; exec sleep 600"])
    child.wait()
while not os.path.exists({str(note)!r}) or open({str(note)!r}).read().count("\\n") < 3:
    time.sleep(0.01)
sys.exit("left three behind")
"""
    episode = episode_of(*python(code))
    assert "left three behind" in str(episode.error)
    pids = note.read_text().split()
    assert len(pids) == 3
    assert not [pid for pid in pids if _runs(pid)]


# Starts a process that has left the session, the folder and its parent, and cleared its variables.
HIDDEN = """
import pathlib, subprocess, sys, time
note = pathlib.Path(sys.argv[1])
script = f"cd / && echo $$ >> {note}; exec sleep 600"
subprocess.run(["env", "-i", "setsid", "--fork", "sh", "-c", script], check=True)
while not note.exists() or not note.read_text().endswith("\\n"):
    time.sleep(0.01)
"""
RUN = """
import asyncio, sys
from whet.core.types import Task
from whet.tasks.command import Command
task = Task("a/0", [{"role": "user", "content": "hi"}])
print(asyncio.run(Command(tuple(sys.argv[1:]), {}).solve(task, "http://127.0.0.1:9/v1", "key")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a keeper needs Linux")
@pytest.mark.parametrize("ends", ["the command", "the run, killed"])
def test_a_process_without_any_mark_ends_with_the_command_and_with_the_run(ends: str, tmp_path: Path) -> None:
    note, killed = tmp_path / "pid", ends == "the run, killed"
    code = HIDDEN + ("time.sleep(600)" if killed else "print('done')")
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, sys.executable, "-c", code, str(note)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert eventually(lambda: note.exists() and note.read_text().endswith("\n"), 60.0)
        if killed:
            run.kill()
        assert run.communicate(timeout=60)[0] == ("" if killed else "done\n")
        assert eventually(lambda: not _runs(note.read_text().strip()), 60.0)
    finally:
        run.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="a keeper needs Linux")
def test_a_command_that_ends_its_group_or_its_keeper_harms_only_itself() -> None:
    trap = ("bash", "-c", "trap 'trap - TERM; kill 0' EXIT; sleep 600 & exit 0")
    assert "was killed by SIGTERM" in str(episode_of(*trap).error)
    code = "call(); assert 'keeper.py' in open(f'/proc/{os.getppid()}/cmdline').read(); os.kill(os.getppid(), 9)\n"
    code += "import time; time.sleep(600)"
    assert "was killed by SIGKILL" in str(episode_of(*python(code)).error)
    assert not [one for one in psutil.Process().children(recursive=True) if _given(one, code)]


def test_a_command_that_can_not_be_started_is_named(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter")
    program.chmod(0o755)
    assert f"{program} can't be started: No such file or directory" in str(episode_of(str(program)).error)


@pytest.mark.parametrize("milliseconds", range(10))
def test_a_run_may_end_while_a_command_starts(
    milliseconds: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of the environments ends, at any moment of the start, and no process is left."""
    monkeypatch.setattr(loop_thread, "_CLOSING", 60.0)  # however busy the machine is
    command, task = Command((*python("import time; time.sleep(600)"), "a run ends"), {}), Lowercase().tasks("train")[0]

    async def start_and_end() -> None:
        thread = LoopThread("environments")
        episode = asyncio.ensure_future(thread.run(command.solve, task, "http://127.0.0.1:1/v1", "k"))
        await asyncio.sleep(milliseconds / 1000)
        episode.cancel()
        await thread.close()
        await asyncio.gather(episode, return_exceptions=True)

    asyncio.run(start_and_end())
    assert "abandoned" not in caplog.text
    own = psutil.Process().children(recursive=True)
    assert eventually(lambda: not any(_given(child, "a run ends") for child in own))


def _given(process: psutil.Process, word: str) -> bool:
    with suppress(psutil.Error):
        return word in " ".join(process.cmdline())
    return False


def test_a_command_that_takes_too_long_is_killed() -> None:
    episode = episode_of(*python("import time; time.sleep(600)"), seconds=1.0)
    assert "took more than data.deadline = 1 s for toy/train/0" in str(episode.error)


def _runs(pid: str) -> bool:
    """Return whether a process runs the command of the test; its number may have been given to another."""
    try:
        return b"600" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"program": ("no-such-agent",)}, "no-such-agent is not a command that can be executed here"),
        ({"program": ()}, "is not a command"),
        ({"program": (os.devnull,)}, "is not a command"),
        ({"program": "tests.endpoint.programs:team", "folder": "."}, "read only where program is a command"),
        ({"program": "tests.endpoint.programs:team", "at_once": 2}, "read only where program is a command"),
        ({"program": ("sh",), "folder": "/no/such"}, "folder = /no/such is not a folder"),
    ],
    ids=str,
)
def test_a_wrong_command_is_an_error_when_the_recipe_is_read(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        AgentTasks(taskset=Lowercase(), **settings)


def test_so_many_commands_run_at_once_and_the_others_wait(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
(folder / str(os.getpid())).touch()
while not (folder / "go").exists():
    time.sleep(0.01)
print("a")
"""
    tasks = AgentTasks(program=(sys.executable, "-c", code), taskset=Lowercase(size=6), at_once=2, deadline=120.0)

    def running() -> int:
        count = 0
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                count += code in child.cmdline() and keeper.__file__ not in child.cmdline()
        return count

    async def played() -> tuple[int, list[float]]:
        environments = tasks.open()
        episodes = [environments.program_for(task) for task in tasks.tasks("train")]
        address = Address("http://127.0.0.1:9/v1", "key")
        playing = asyncio.gather(*(episode.run(address) for episode in episodes))
        assert await asyncio.to_thread(eventually, lambda: len(list(tmp_path.iterdir())) >= 2, 100)
        count = running()
        (tmp_path / "go").touch()
        return count, [step.reward for step in await playing]

    assert asyncio.run(played()) == (2, [1.0] * 6)
