"""Task folders in Harbor's layout: a right solution earns what the tests write, and no cheat reaches the tests."""

import asyncio
import re
from pathlib import Path

import pytest

from whet.base.errors import ConfigError, DataError
from whet.shells.container import Container
from whet.shells.local import Local, _problem
from whet.shells.runtime import ShellLimits
from whet.tasks.base import Step
from whet.tasks.episodes import play
from whet.tasks.shell.folders import TaskFolders
from whet.tasks.shell.images import files_in
from whet.tasks.tools.base import solution
from whet.tasks.validate import validate, wrong

pytestmark = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")

FILES = {
    "instruction.md": "Write the sum of the numbers in data/numbers.txt to sum.txt.",
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20.0\n',
    "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /app\nCOPY . .\n",
    "environment/data/numbers.txt": "20\n22\n",
    "tests/expected/sum.txt": "42\n",
    "tests/check.py": "import json\nassert open('/app/sum.txt').read() == open('/tests/expected/sum.txt').read()\n",
    "tests/test.sh": "if python3 -m check; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "awk '{s += $1} END {print s}' data/numbers.txt > sum.txt\n",
}


def write(folder: Path, files: dict[str, str]) -> TaskFolders:
    for name, text in files.items():
        (folder / "sum" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sum" / name).write_text(text)
    return TaskFolders(path=str(folder), runtime=Local(limits=ShellLimits(deadline_s=10, disk_mib=4, memory_mib=256)))


def played(tasks: TaskFolders, *commands: str) -> Step:
    calls = [("bash", {"command": command}) for command in commands]
    _, step = asyncio.run(play(tasks.make(tasks.tasks("train")[0]), solution(*calls, answer="done")))
    return step


def test_gold_earns_1_and_nothing_earns_0(tmp_path: Path) -> None:
    assert wrong(asyncio.run(validate(write(tmp_path, FILES), 1))) == []


def test_the_policy_sees_the_files_of_the_environment_alone(tmp_path: Path) -> None:
    step = played(write(tmp_path, FILES), "pwd; find . /tests /logs -type f; cat data/numbers.txt")
    assert [message["content"] for message in step.messages if message["role"] == "tool"] == [
        "/app\n./data/numbers.txt\n20\n22"
    ]


REWARD = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"
SHIM = f"printf '#!/bin/bash\\n{REWARD}\\nexit 0\\n' > python3; chmod +x python3"
PYTHON = "printf 'import os\\nos._exit(0)\\n'"
SITE = ".local/lib/python3.$(python3 -c 'import sys; print(sys.version_info[1])')/site-packages"
CHEATS = {
    "writes the reward": REWARD,
    "overwrites the tests": f"mkdir -p /tests && echo '{REWARD}' > /tests/test.sh; echo 'pass' > /tests/check.py",
    "a background process waits for the tests": f"(setsid bash -c 'while true; do {REWARD}; done' &) ; sleep 0.2",
    "modules that shadow the standard library": f"{PYTHON} | tee json.py check.py sitecustomize.py > conftest.py",
    "a user's site-packages": f"mkdir -p {SITE}; {PYTHON} | tee {SITE}/usercustomize.py > {SITE}/x.pth",
    "a program in front of the path": f"{SHIM}; mkdir -p bin .local/bin; cp python3 bin; cp python3 .local/bin",
    "files that shells read": f"echo '{REWARD}; exit' | tee .bashrc .profile .bash_profile .bash_env > /dev/null",
    "a library that is loaded first": "echo /app/x.so > ld.so.preload; echo x > x.so; export LD_PRELOAD=/app/x.so",
    "the result is a link to the expected text": "ln -s /tests/expected/sum.txt sum.txt",
    "the same, relative": "ln -s ../tests/expected/sum.txt sum.txt",
    "the same, over a link": "mkdir sub; ln -s .. sub/up; ln -s sub/up/../tests/expected/sum.txt sum.txt",
    "the same, over the process": "ln -s /proc/self/cwd/expected/sum.txt sum.txt",
    "the work folder is a link": "cd / && rm -rf /app/* && rmdir /app; ln -s /tests/expected /app",
    "the reward's folder is a link": "ln -s /logs logs; mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt",
    "kills everything": "kill -9 -1",
    "files that can't be carried": "for i in 1 2 3; do truncate -s 4000000 big$i; done",
    "a result that can't be read": "echo 42 > sum.txt; chmod 000 sum.txt",
    "a result that blocks": "mkfifo sum.txt",
}


@pytest.mark.parametrize("what", CHEATS)
def test_cheats_earn_nothing(tmp_path: Path, what: str) -> None:
    assert played(write(tmp_path, FILES), CHEATS[what]).reward == 0.0


def test_a_right_solution_earns_its_reward_among_remains_of_cheats(tmp_path: Path) -> None:
    step = played(write(tmp_path, FILES), *(CHEATS[what] for what in list(CHEATS)[:8]), FILES["solution/solve.sh"])
    assert (step.reward, step.scores["correct"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("script", "reward", "missing"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", 0.5, 0.0),
        ("echo '{\"reward\": 0.25}' > /logs/verifier/reward.json", 0.25, 0.0),
        (
            'echo \'{"reward": 0.25, "tests": 3}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt',
            0.25,
            0,
        ),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', 0.0, 1.0),
        ('echo \'{"reward": 1, "other": NaN}\' > /logs/verifier/reward.json', 0.0, 1.0),
        ("echo '{\"other\": 1}' > /logs/verifier/reward.json", 0.0, 1.0),
        ("echo 1 > /logs/verifier/reward.json", 0.0, 1.0),
        ("#!/usr/bin/python3\nopen('/logs/verifier/reward.txt', 'w').write('0.75')", 0.75, 0.0),
        ("echo nan > /logs/verifier/reward.txt", 0.0, 1.0),
        ("exit 1", 0.0, 1.0),
        ("echo 1 > /logs/verifier/reward.txt; rm /logs/verifier/reward.txt; sleep 100", 0.0, 1.0),
    ],
)
def test_the_reward_is_what_the_tests_write(tmp_path: Path, script: str, reward: float, missing: float) -> None:
    seconds = 2.0 if "sleep" in script else 60.0
    tests = {"tests/test.sh": script, "task.toml": f"[verifier]\ntimeout_sec = {seconds}\n"}
    step = played(write(tmp_path, FILES | tests), "true")
    assert (step.reward, step.scores["no_reward"]) == (reward, missing)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment/Dockerfile", "FROM x\nRUN apt-get install gcc\n", r"Dockerfile:2: 'RUN apt-get install gcc'"),
        ("environment/Dockerfile", "FROM x\nWORKDIR /usr\n", "Dockerfile:2: 'WORKDIR /usr'"),
        ("environment/docker-compose.yaml", "", "docker-compose"),
        ("environment/Dockerfile", "FROM x\nCOPY . .\nWORKDIR /app\n", "Dockerfile:3: 'WORKDIR /app'"),
        ("environment/.dockerignore", "data", ".dockerignore can't be followed"),
        ("trajectory.json", "[]", "no task in the middle of an episode"),
        ("task.toml", "[environment]\ndocker_image = 'x'\n", r"environment\.docker_image can't be followed"),
        ("task.toml", "[environment]\nenv = {KEY = 'x'}\n", r"environment\.env can't be followed"),
        ("task.toml", "[environment.healthcheck]\ncommand = 'true'\n", r"environment\.healthcheck can't be followed"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'x'\n", r"environment\.mcp_servers can't be followed"),
        ("task.toml", "[environment]\nos = 'windows'\n", r"environment\.os = windows can't be followed, only linux"),
        ("task.toml", "[agent]\nnetwork_mode = 'allowlist'\n", "agent.network_mode = allowlist can't be followed"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "verifier.environment_mode = separate"),
        ("task.toml", "[verifier.environment]\nworkdir = '/app'\n", r"verifier\.environment can't be followed"),
        ("task.toml", "[solution]\nenv = {KEY = 'x'}\n", r"solution\.env can't be followed"),
        ("task.toml", "[environment]\nworkdir = '/work'\n", "environment.workdir = /work can't be followed"),
        ("task.toml", "[[steps]]\nname = 'first'\n", "steps can't be followed"),
        ("task.toml", "[verifier]\nenv = {KEY = 'x'}\n", r"verifier\.env can't be followed"),
        ("task.toml", "[verifier\n", r"sum/task\.toml: "),
        ("task.toml", "verifier = 3\n", r"sum/task\.toml: verifier = 3 is not a table; write \[verifier\]"),
        ("instruction.md", " \n", r"sum/instruction\.md is empty"),
        *(
            ("task.toml", f"[verifier]\ntimeout_sec = {value}\n", "is not a valid number of seconds")
            for value in ("inf", "nan", "-1", "0", "1e300", "true", "'30'")
        ),
        ("task.toml", "[environment]\nbuild_timeout_sec = 0\n", "environment.build_timeout_sec = 0 is not a valid"),
    ],
)
def test_what_the_runtime_cannot_do_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write(tmp_path, FILES | {name: text}).tasks("train")


def test_tests_start_in_the_work_folder_as_harbors_do_where_the_recipe_says_so(tmp_path: Path) -> None:
    """Harbor's own templates name results relative to the work folder, and leave the work folder to task.toml."""
    files = {
        "instruction.md": "Write 42 to sum.txt.",
        "task.toml": "schema_version = '1.4'\n[environment]\nos = 'Linux'\nworkdir = '/app'\nnetwork_mode = 'public'\n",
        "environment/Dockerfile": "FROM debian:bookworm\n\n# Nothing is copied.\nWORKDIR /workspace",
        "environment/notes.txt": "not copied",
        "tests/is42": "#!/bin/sh\ngrep -qx 42 $1",
        "tests/test.sh": "#!/bin/bash\n/tests/is42 sum.txt; echo $((! $?)) > /logs/verifier/reward.txt\n",
    }
    tasks = write(tmp_path, files)
    (tmp_path / "sum/tests/is42").chmod(0o755)
    as_in_harbor = tasks.model_copy(update={"tests_in_work_folder": True})
    answer = "pwd; ls; echo 42 > sum.txt"
    assert played(tasks, answer).reward == 0.0
    step = played(as_in_harbor, answer)
    assert (step.reward, step.scores["no_reward"]) == (1.0, 0.0)
    assert [message["content"] for message in step.messages if message["role"] == "tool"] == ["/app"]
    assert played(as_in_harbor, "echo 41 > sum.txt").reward == 0.0


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no task folders"):
        TaskFolders(path=str(tmp_path)).tasks("train")
    tasks = write(tmp_path, {"instruction.md": "Do it."})
    with pytest.raises(DataError, match=r"has no task\.toml"):
        tasks.tasks("train")
    assert tasks.tasks("test") == []


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "environment/Dockerfile", "solution/solve.sh"])
def test_a_file_that_is_not_a_text_is_named(tmp_path: Path, name: str) -> None:
    tasks, file = write(tmp_path, FILES), tmp_path / "sum" / name
    for problem in ("invalid start byte", "Is a directory"):
        file.unlink()
        file.mkdir() if "directory" in problem else file.write_bytes(b"\xff\xfe")
        with pytest.raises(DataError, match=rf"{re.escape(str(file))} can't be read as text: .*{problem}"):
            tasks.gold(tasks.tasks("train")[0])


# Images

STUB = str(Path(__file__).parents[1] / "shells/stub_engine.py")
LIMITS = ShellLimits(deadline_s=10, disk_mib=4, memory_mib=256)
IMAGE = FILES | {
    "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /opt/sums\nRUN seq 3 > made.txt\nCOPY . .\n",
    "tests/check.py": "assert open('/opt/sums/sum.txt').read() == '42\\n' and open('/opt/sums/made.txt').read()\n",
}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the list of images that the stub of an engine has built."""
    monkeypatch.setenv("STUB_ENGINE", str(tmp_path / "engine"))
    (tmp_path / "engine/images").mkdir(parents=True)
    return tmp_path / "engine/images/built"


def in_images(folder: Path, files: dict[str, str]) -> TaskFolders:
    files_in.cache_clear()
    tasks = write(folder / "tasks", files)
    return tasks.model_copy(update={"runtime": Container(command=STUB, limits=LIMITS)})


def shown(step: Step) -> list[object]:
    return [message["content"] for message in step.messages if message["role"] == "tool"]


@pytest.mark.slow
def test_a_task_is_played_and_graded_in_the_image_of_its_dockerfile(tmp_path: Path, built: Path) -> None:
    tasks = in_images(tmp_path, IMAGE)
    assert wrong(asyncio.run(validate(tasks, 1))) == []
    step = played(tasks, "pwd; ls; cat made.txt; rm made.txt", FILES["solution/solve.sh"])
    assert shown(step)[0] == "/opt/sums\nDockerfile\ndata\nmade.txt\n1\n2\n3"
    assert step.reward == 0.0, "the policy removed a file that the tests read"
    tasks.open()
    assert len(built.read_text().split()) == 1, "an image is built once"
    (tmp_path / "tasks/sum/environment/data/numbers.txt").write_text("40\n2\n")
    tasks.open()
    assert len(set(built.read_text().split())) == 2, "other files are another image"


@pytest.mark.slow
def test_an_image_that_is_there_is_used_by_its_name(tmp_path: Path, built: Path) -> None:
    named = "[environment]\ndocker_image = 'programs'\nworkdir = '/opt'\n"
    files = {name: text for name, text in IMAGE.items() if not name.startswith("environment/")} | {"task.toml": named}
    with pytest.raises(ConfigError, match=r"programs: the files in /opt can't be copied into memory.*No such file"):
        in_images(tmp_path, files).open()
    (built.parent / "programs/opt").mkdir(parents=True)
    (built.parent / "programs/opt/given").write_text("x")
    assert shown(played(in_images(tmp_path, files), "ls")) == ["given"]
    assert not built.exists()
    with pytest.raises(ConfigError, match=r"No such image: absent.*pull absent"):
        in_images(tmp_path, files | {"task.toml": named.replace("programs", "absent")}).open()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment/Dockerfile", "FROM x\n", "no work folder is named.*environment.workdir"),
        ("environment/Dockerfile", "FROM x\nWORKDIR /usr/src\n", "the work folder /usr/src can't be used"),
        ("environment/Dockerfile", "FROM x\nWORKDIR $HOME\n", r"the work folder \$HOME can't be used"),
        ("task.toml", "[environment]\nworkdir = '/opt/../etc'\n", "the work folder /opt/../etc can't be used"),
        ("environment/docker-compose.yaml", "", "docker-compose can't be followed"),
        ("task.toml", "[environment]\nenv = {A = 'x'}\n", r"environment\.env can't be followed"),
    ],
)
def test_a_task_whose_image_cannot_be_used_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        in_images(tmp_path, IMAGE | {name: text}).tasks("train")


def test_a_build_that_fails_and_a_task_without_an_image_are_named(tmp_path: Path, built: Path) -> None:
    broken = {"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN exit 3\n"}
    with pytest.raises(ConfigError, match=r"environment/Dockerfile: the image can't be built: .*RUN exit 3"):
        in_images(tmp_path, IMAGE | broken).open()
    (tmp_path / "tasks/sum/environment/Dockerfile").unlink()
    with pytest.raises(DataError, match=r"the task has no image.*runtime.image"):
        TaskFolders(path=str(tmp_path / "tasks"), runtime=Container(command=STUB)).tasks("train")
    with pytest.raises(ConfigError, match=r"runtime.image: name an image; only task folders"):
        Container(command=STUB).check()
