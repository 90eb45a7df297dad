"""An agent's command in a runtime of shells: the same result as on the machine, one way out, and every hostile command
is stopped and named, and is never a reward."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.fault_contract import eventually
from tests.endpoint.agents import first_episode
from tests.endpoint.certificates import certificate
from tests.shells.test_remote import TOKEN, served
from tests.toy import Lowercase
from whet.base.errors import ConfigError
from whet.config import SettingsError
from whet.core.types import Episode, Status
from whet.rollouts.sampling import Sampling
from whet.shells.container import Container
from whet.shells.local import Local, _problem
from whet.shells.remote import Remote
from whet.shells.runtime import RuntimeKind, ShellLimits
from whet.tasks.program import AgentTasks
from whet.tasks.shell.repositories import Repositories

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the runtime of the shell needs Linux"),
    pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}"),
]

# An agent that lets the model see what its last command printed, and runs what the model answers.
AGENT = """
import json, os, subprocess, sys, urllib.request
def ask(messages, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = json.load(sys.stdin)
def turn():
    reply = ask(messages)
    printed = subprocess.run(["bash", "-c", reply["content"]], stdin=subprocess.DEVNULL, capture_output=True)
    messages.extend([reply, {"role": "user", "content": printed.stdout.decode() or "nothing"}])
"""
LIMITS = ShellLimits(deadline_s=60, memory_mib=256, disk_mib=4, processes=20)


def tasks_in(kind: RuntimeKind) -> Repositories:
    return Repositories(train_size=1, test_size=1, functions=2, runtime=kind, limits={"deadline_s": 90})


def gold(repositories: Repositories) -> str:
    data = repositories.tasks("train")[0].data
    return f"cat > {data.path} <<'END'\n{data.repaired}END"


def episode_of(code: str, *replies: str, kind: RuntimeKind, inside: bool = True, **settings: Any) -> Episode:
    """Play the first repository with a program of Python, of which the model's replies are given."""
    left = iter(replies)
    settings = {"program": ("python3", "-c", AGENT + code), "deadline": 100.0, "in_runtime": inside} | settings
    sampling = Sampling(max_turns=8, max_new_tokens=1000, max_prompt_tokens=8000, max_episode_tokens=20_000)
    return first_episode(AgentTasks(taskset=tasks_in(kind), **settings), lambda _: next(left), sampling)


class SameAsOnTheMachine:
    """A class of tests inherits this and gives the fixture ``kind``: the agent's runtime."""

    def test_a_repository_is_repaired_with_the_same_calls_and_scores(self, kind: RuntimeKind) -> None:
        replies = ("ls", gold(tasks_in(kind)), "python3 -m unittest 2>/dev/null && echo passed")
        there, here = (episode_of("for _ in range(3): turn()", *replies, kind=kind, inside=i) for i in (True, False))
        assert (there.status, there.reward, there.error) == (Status.COMPLETED, 1.0, here.error), there.error
        assert (there.reward, there.scores) == (here.reward, here.scores)
        [inside], [outside] = there.branches, here.branches
        assert [span.tokens for span in inside.spans] == [span.tokens for span in outside.spans]
        assert [span.trained for span in inside.spans] == [False, True] * 3

    def test_the_token_of_another_episode_and_other_places_are_not_reached(self, kind: RuntimeKind) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            code = f"""
import socket, urllib.error
def refused(call):
    try: call()
    except (OSError, urllib.error.HTTPError) as error: return isinstance(error, OSError)
    return False
turn()
try: ask(messages, "0" * 64)
except urllib.error.HTTPError as error: assert error.code == 401, error
else: sys.exit("another token was taken")
assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:4180/v1"
for place in (("127.0.0.1", {other.getsockname()[1]}), ("10.0.0.1", 80), ("1.1.1.1", 53)):
    assert refused(lambda: socket.create_connection(place, 2)), place
assert not os.listdir("/tests") and "WHET_TEST_SECRET" not in os.environ
"""
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WHET_TEST_SECRET", "x")
                episode = episode_of(code, gold(tasks_in(kind)), kind=kind)
        assert (episode.status, episode.reward) == (Status.COMPLETED, 1.0), episode.error


class EndsAsOnTheMachine:
    """The same of agents that fail."""

    def test_without_a_repair_it_earns_nothing(self, kind: RuntimeKind) -> None:
        episode = episode_of("turn(); print('all tests pass')", "true", kind=kind)
        assert (episode.status, episode.reward, episode.scores["pass_to_pass"]) == (Status.COMPLETED, 0.0, 1.0)

    def test_a_command_that_fails_is_named_and_no_reward(self, kind: RuntimeKind) -> None:
        episode = episode_of("turn(); sys.exit('broken')", gold(tasks_in(kind)), kind=kind)
        assert episode.status == Status.FAILED
        assert "python3 exited with status 1 for repositories/train/0; its output ends: broken" in str(episode.error)

    def test_a_command_that_hangs_is_ended_at_its_deadline(self, kind: RuntimeKind) -> None:
        code = "turn(); subprocess.Popen(['setsid', 'sleep', '31539']); import time; time.sleep(1000)"
        episode = episode_of(code, gold(tasks_in(kind)), kind=kind, deadline=10.0)
        assert episode.status == Status.FAILED
        assert "python3 took more than data.deadline = 10 s" in str(episode.error)
        assert eventually(lambda: subprocess.run(["pgrep", "-f", "^sleep 31539"], check=False).returncode == 1)


class TestLocal(SameAsOnTheMachine, EndsAsOnTheMachine):
    @pytest.fixture
    def kind(self) -> RuntimeKind:
        return Local(limits=LIMITS)


class InContainer:
    """Over the stub of an engine, which runs the commands in namespaces."""

    @pytest.fixture
    def kind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeKind:
        monkeypatch.setenv("STUB_ENGINE", str(tmp_path))
        stub = Path(__file__).parents[1] / "shells/stub_engine.py"
        return Container(image="programs", command=str(stub), limits=LIMITS)


@pytest.mark.slow
class TestContainer(InContainer, SameAsOnTheMachine, EndsAsOnTheMachine):
    """Slow, because tests/shells/test_container.py has single commands, their failures and their deadlines."""


class TestRemote(SameAsOnTheMachine, EndsAsOnTheMachine):
    """Over TLS, on this machine."""

    @pytest.fixture
    def kind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeKind]:
        monkeypatch.setenv("WHET_SHELLS_TOKEN", TOKEN)
        made, key = certificate(tmp_path)
        with served(LIMITS, certificate=str(made), key=str(key)) as server:
            yield Remote(url=server.url, certificate=str(made), limits=LIMITS)
            assert eventually(lambda: server._runtimes == 0 and not server.links)


HOSTILE = {
    "memory": ("x = bytearray(2**33)", "MemoryError"),
    "memory of several": ("subprocess.run('for i in 1 2 3 4; do python3 -c \"x = b\\'x\\' * (100 << 20); import time;"
                          " time.sleep(50)\" & done; wait', shell=True)", "used more than runtime.limits.memory_mib"),
    "disk": ("open('big', 'wb').write(b'x' * (5 << 20))", "File too large|No space left"),
    "disk, in pieces": ("[open(f'big{i}', 'wb').write(b'x' * (1 << 20)) for i in range(9)]", "No space left"),
    "processes": ("[subprocess.Popen(['sleep', '60']) for _ in range(40)]", "Resource temporarily unavailable"),
    "itself": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    "process 1": ("os.kill(1, 9)", "Operation not permitted"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_command_is_stopped_and_named_and_never_a_reward(what: str) -> None:
    code, named = HOSTILE[what]
    kind = Local(limits=LIMITS)
    episode = episode_of(f"turn()\n{code}", gold(tasks_in(kind)), kind=kind)
    assert episode.status == Status.FAILED
    assert re.search(named, str(episode.error)), episode.error


def test_a_used_up_budget_ends_it_at_once() -> None:
    kind = Local(limits=LIMITS)
    code = """
import time
while True:
    try: turn()
    except Exception: time.sleep(0.1)
"""
    episode = episode_of(code, *["true"] * 99, kind=kind)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "turns", 0.0), episode.error


def test_settings_that_can_not_work_are_named() -> None:
    with pytest.raises(SettingsError, match=r"in_runtime: Lowercase has no runtime"):
        AgentTasks(program=("sh",), taskset=Lowercase(size=4), in_runtime=True)
    tasks = AgentTasks(program=("no-such-agent",), taskset=tasks_in(Local(limits=LIMITS)), in_runtime=True)
    with pytest.raises(ConfigError, match=r"program: the runtime local has no command no-such-agent.*runtime.readable"):
        tasks.open()
