"""Tasks in a shell: gold commands earn 1, cheats and hostile commands earn 0 or are named to the policy."""

import asyncio
import re
from collections import Counter
from typing import Any, get_args

import pytest

from tests.grids import taking_turns
from whet.base.errors import ConfigError
from whet.core.types import Message, Task
from whet.shells.local import Local, _problem
from whet.shells.runtime import RuntimeFailure, ShellLimits
from whet.tasks.base import Step
from whet.tasks.episodes import play
from whet.tasks.shell.generated import Kind, ShellTasks
from whet.tasks.tools.base import solution
from whet.tasks.validate import validate, wrong
from whet.tools.toolbox import ToolLimits

pytestmark = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")

SMALL: dict[str, Any] = {"train_size": 12, "test_size": 2}
LIMITS = ShellLimits(deadline_s=5, memory_mib=128, disk_mib=2, processes=12, output_bytes=300)


def played(tasks: ShellTasks, task: Task, *calls: tuple[str, dict[str, Any]]) -> Step:
    _, step = asyncio.run(play(tasks.make(task), solution(*calls, answer="done")))
    return step


def results(step: Step) -> list[str]:
    return [str(message["content"]) for message in step.messages if message["role"] == "tool"]


def last_result(step: Step) -> str:
    return results(step)[-1]


QUICK = ("count", "replace")  # a number, another content


@pytest.mark.parametrize("kind", taking_turns(get_args(Kind), QUICK))
def test_gold_commands_earn_1_and_answers_to_other_tasks_or_silence_earn_0(kind: Kind) -> None:
    assert wrong(asyncio.run(validate(ShellTasks(**SMALL, kinds=(kind,)), 3))) == []


def test_the_work_is_not_done_at_the_start() -> None:
    tasks = ShellTasks(train_size=300, test_size=50)
    assert all(task.data.before != task.data.after for task in [*tasks.tasks("train"), *tasks.tasks("test")])


@pytest.fixture(scope="module")
def counting() -> ShellTasks:
    return ShellTasks(**SMALL, kinds=("count",), runtime=Local(limits=LIMITS))


HOSTILE = {
    "never ends": ("while true; do :; done", "[killed after 5 s"),
    "forks without limit": ("f() { f | f & }; f; while true; do :; done", "[killed after 5 s"),
    "fills the disk": ("head -c 9000000 /dev/zero > full", "[exit status"),
    "fills the memory": ("python3 -c 'x = bytearray(1 << 30)'", "[exit status 1]"),
    "kills everything": ("kill -9 -1; kill -9 $$", "[killed by signal 9]"),
    "prints without end": ("yes", "bytes are left out]"),
    "fails": ("exit 7", "[exit status 7]"),
    "prints nothing": ("true", "[no output]"),
}


@pytest.mark.parametrize("what", taking_turns(HOSTILE, [*HOSTILE][2:]))
def test_a_hostile_command_is_named_to_the_policy_and_the_task_can_still_be_done(
    counting: ShellTasks, what: str
) -> None:
    task, (command, shown) = counting.tasks("train")[0], HOSTILE[what]
    clean = "rm -f full; " + task.data.command
    step = played(counting, task, ("bash", {"command": command}), ("bash", {"command": clean}))
    assert shown in results(step)[0]
    assert step.reward == 1.0


CHEATS = {
    "a background process writes later": "(sleep 1; {command}) &",
    "the result is a link to a file": "{command}; mv {made} /tmp/x; ln -s /tmp/x {made}",
    "the result is a pipe": "mkfifo {made}",
    "the result can't be read": "{command}; chmod 000 {made}",
    "the work folder is replaced": "{command}; cd /; mv /work /tmp/w; ln -s /tmp/w /work; rm -f /work/{made}",
    "every number": "seq 100 > {made}",
    "the given file is emptied": "for f in *; do : > $f; done; echo 0 > {made}",
    "further files": "{command}; echo 1 > reward.txt",
    "too many large files": "{command}; for i in 1 2 3; do truncate -s 2000000 big$i; done",
}


@pytest.mark.parametrize("what", CHEATS)
def test_cheats_earn_nothing(counting: ShellTasks, what: str) -> None:
    for task in counting.tasks("train")[:2]:
        (made,) = set(task.data.after) - set(task.data.before)
        command = CHEATS[what].format(command=task.data.command, made=made)
        assert played(counting, task, ("bash", {"command": command})).reward == 0.0, command


SHORTCUTS: dict[Kind, list[str]] = {
    "count": ["cat * | wc -l > {made}", "wc -l {given} > {made}"],
    "column": ["cut -d, -f2 * > {made}", "cp {given} {made}", "cut -f1 {given} > {made}"],
    "sort": ["sort {given} > {made}", "cp {given} {made}", "tac {given} > {made}", "sort -n * > {made}"],
    "filter": ["grep -m1 {word} {given} > {made}", "cp {given} {made}", "grep -h {word} * > {made}"],
    "sum": ["cat * | awk '{{s += $1}} END {{print s}}' > {made}", "cp {given} {made}"],
    "first": ["cp {given} {made}", "head {given} > {made}", "head -n 1 {given} > {made}"],
    "unique": ["sort {given} > {made}", "uniq {given} > {made}", "cp {given} {made}", "sort -u * > {made}"],
    "replace": ["sed -i s/{word}/{new}/ *"],
    "join": ["cat * > {made}", "cp {given} {made}"],
}


@pytest.mark.parametrize("kind", taking_turns(SHORTCUTS, QUICK))
def test_commands_that_ignore_a_part_of_the_task_earn_nothing(kind: Kind) -> None:
    tasks = ShellTasks(train_size=30, test_size=2, kinds=(kind,))
    for task in tasks.tasks("train")[:3]:
        words = task.data.command.replace("/", " ").split()
        word = words[3 if kind == "replace" else 1]
        names = {"given": next(iter(task.data.before)), "made": words[-1], "word": word, "new": words[4]}
        for command in SHORTCUTS[kind]:
            assert played(tasks, task, ("bash", {"command": command.format(**names)})).reward == 0.0, command


@pytest.mark.parametrize(("kind", "most"), [("count", 0.05), ("sum", 0.05), ("column", 0.05), ("first", 0.05)])
def test_a_result_that_is_written_without_a_look_at_the_files_is_rarely_right(kind: Kind, most: float) -> None:
    tasks = ShellTasks(train_size=400, test_size=2, kinds=(kind,)).tasks("train")
    results = Counter(text for task in tasks for path, text in task.data.after.items() if path not in task.data.before)
    assert results.most_common(1)[0][1] / len(tasks) < most


@pytest.mark.parametrize("kind", ["column", "first"])
def test_a_number_of_the_question_that_is_always_the_same_is_right_in_a_quarter_at_most(kind: Kind) -> None:
    tasks = ShellTasks(train_size=400, test_size=2, kinds=(kind,)).tasks("train")
    numbers = Counter(re.findall(r"\d", task.data.command)[0] for task in tasks)
    assert numbers.most_common(1)[0][1] / len(tasks) < 0.25


@pytest.mark.parametrize("lines", [3, 50])
def test_tasks_are_drawn_from_files_of_any_length(lines: int) -> None:
    for task in ShellTasks(train_size=100, test_size=2, lines=lines, kinds=("filter", "first", "sort")).tasks("train"):
        given = next(iter(task.data.before.values()))
        made = [text for path, text in task.data.after.items() if path not in task.data.before]
        assert 3 <= given.count("\n") <= lines
        assert made != [given]


def test_the_editor_views_creates_and_replaces() -> None:
    tasks = ShellTasks(**SMALL, kinds=("replace",), editor=True)
    task = tasks.tasks("train")[0]
    path, text = next(iter(task.data.before.items()))
    step = played(
        tasks,
        task,
        ("view_file", {"path": path, "last_line": 1}),
        ("replace_in_file", {"path": path, "old": "not there", "new": "x"}),
        ("view_file", {"path": "absent"}),
        ("replace_in_file", {"path": path, "old": text, "new": "everything"}),
        ("create_file", {"path": path, "content": task.data.after[path]}),
    )
    assert step.reward == 1.0
    first, nowhere, absent, replaced, created = results(step)
    assert first == f"1\t{text.splitlines()[0]}"
    assert nowhere == f"Error: old occurs 0 times in {path}"
    assert absent == "Error: absent: No such file or directory"
    assert replaced == created == f"wrote {path}"


def test_a_policy_without_the_editor_has_bash_alone(counting: ShellTasks) -> None:
    step = played(counting, counting.tasks("train")[0], ("create_file", {"path": "x", "content": "1"}))
    assert "there is no tool 'create_file'" in last_result(step)


def test_a_runtime_that_dies_fails_the_episode(counting: ShellTasks) -> None:
    async def episode() -> None:
        environment = counting.make(counting.tasks("train")[0])
        await environment.start()
        environment.state.runtime._child.process.kill()  # type: ignore[attr-defined]
        try:
            reply: Message = {"role": "assistant", "content": "done"}
            await environment.step(reply)
        finally:
            await environment.close()

    with pytest.raises(RuntimeFailure):
        asyncio.run(episode())


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be above runtime\.limits\.deadline_s = 40"):
        ShellTasks(runtime=Local(limits=ShellLimits(deadline_s=40)), limits=ToolLimits(deadline_s=30))
    monkeypatch.setattr("whet.shells.local._problem", lambda: "no namespaces")
    with pytest.raises(ConfigError, match="can't isolate commands here"):
        ShellTasks(**SMALL).open()
