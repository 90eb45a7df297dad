"""Episodes with tools: a solved task earns 1, else 0; the model's errors are shown to it, and the built-in task sets
are seeded, solvable by their gold answers, and resistant to cheating."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_time import cpu_seconds_below
from tests.tiny import tiny_tokenizer
from whet.base.errors import ConfigError, DataError
from whet.chat.calls import checked_call
from whet.chat.renderer import Renderer
from whet.config.component import import_path
from whet.core.types import Message, Task
from whet.processes.loop_thread import UserCodeExit
from whet.tasks.base import TASK_SETS, Step
from whet.tasks.cases import Answer
from whet.tasks.games import Guessing, SlidingPuzzle
from whet.tasks.tools.base import SeededToolTasks, ToolTasks, right_or_wrong, says, solution
from whet.tasks.tools.calculator import Calculator, calculate
from whet.tasks.tools.database import Database, Queries
from whet.tasks.traces import Traces
from whet.tasks.validate import validate, wrong
from whet.tools.tool import ToolError
from whet.tools.toolbox import ToolLimits

SEEDED = ("booking_desk", "calculator", "corpus_search", "database", "guessing", "sliding_puzzle")
SMALL: dict[str, Any] = {"train_size": 40, "test_size": 10}


def seeded(name: str, **settings: Any) -> SeededToolTasks:
    made: SeededToolTasks = import_path(TASK_SETS[name])(**{**SMALL, **settings})
    return made


async def play(tasks: ToolTasks, task: Task, replies: Answer) -> list[Step]:
    environments = tasks.open()
    environment = environments.make(task)
    steps: list[Step] = []
    try:
        await environment.start()
        for reply in [Message(role="assistant", content=replies)] if isinstance(replies, str) else replies:
            steps.append(await environment.step(reply))
            if steps[-1].done:
                break
    finally:
        await environment.close()
        await environments.close()
    return steps


def played(tasks: ToolTasks, task: Task, replies: Answer) -> list[Step]:
    return asyncio.run(play(tasks, task, replies))


@pytest.mark.parametrize("name", SEEDED)
def test_right_answers_earn_1_and_answers_to_other_tasks_or_silence_earn_0(name: str) -> None:
    graded = asyncio.run(validate(seeded(name), 20))
    assert len(graded) >= 40
    assert wrong(graded) == []


@pytest.mark.parametrize("name", SEEDED)
def test_tasks_are_seeded_distinct_and_apart(name: str) -> None:
    train, test = seeded(name).tasks("train"), seeded(name).tasks("test")
    assert train == seeded(name).tasks("train")
    assert train != seeded(name, seed=1).tasks("train")
    assert (len(train), len(test)) == (40, 10)
    keys = [json.dumps([task.prompt, task.columns], sort_keys=True) for task in [*train, *test]]
    assert len(set(keys)) == 50
    assert len({task.uid for task in [*train, *test]}) == 50


def test_too_few_different_tasks_are_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"calculator: only .* different train tasks in .* draws, but train_size is 1000; lower train_size",
    ):
        Calculator(digits=1, train_size=1000, test_size=0).tasks("train")


class Room(ToolTasks):
    """Open the door."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("room/0", [{"role": "user", "content": "Open the door."}])]

    def state(self, task: Task) -> "Door":
        return Door()

    def score(self, task: Task, state: "Door", answer: str) -> dict[str, float]:
        return right_or_wrong(state._open)


class Door:
    _open = False

    def push(self, force: int) -> str:
        """Push it."""
        if force > 100:
            raise ConnectionResetError("the door is gone")
        if force < 0:
            raise SystemExit(1)
        self._open = force > 3
        return "it moves"


def message(content: str = "", malformed: str = "", **calls: dict[str, Any]) -> Message:
    reply: Message = {"role": "assistant", "content": content}
    if calls:
        reply["tool_calls"] = [checked_call({"name": name, "arguments": calls[name]}, 0) for name in calls]
    if malformed:
        reply["malformed_calls"] = [malformed]
    return reply


ROOM = Room()
(TASK,) = ROOM.tasks("train")


def test_the_final_state_of_the_tools_is_graded() -> None:
    first, last = played(ROOM, TASK, [message(push={"force": 5}), message("It is open.")])
    assert (first.done, first.reward) == (False, 0)
    assert first.messages == [{"role": "tool", "name": "push", "tool_call_id": "call00000", "content": "it moves"}]
    assert (last.done, last.reward, last.scores["correct"], last.scores["tool_calls"]) == (True, 1.0, 1.0, 1.0)
    assert played(ROOM, TASK, [message(push={"force": 2}), message("It is open.")])[-1].reward == 0
    assert played(ROOM, TASK, "It is open.")[-1].reward == 0  # each episode has its own state


def test_the_system_message_of_the_recipe_begins_prompts_that_have_none() -> None:
    def asked(task: Task) -> list[str]:
        return [message["role"] for message in asyncio.run(Room(system="Be brief.").make(task).start()).messages]

    assert asked(TASK) == ["system", "user"]
    assert asked(Task("room/1", [{"role": "system", "content": "Be kind."}, *TASK.prompt])) == ["system", "user"]
    assert [message["role"] for message in TASK.prompt] == ["user"]


@pytest.mark.parametrize("state", [None, object(), partial(max, 1)])
def test_a_state_without_a_tool_is_an_error_that_names_the_users_class(state: object) -> None:
    class Forgets(Room):
        def state(self, task: Task) -> Any:
            return state

    with pytest.raises(ConfigError, match=r"Forgets\.state \(.*test_tool_tasks\.py:\d+\) returned .* has no tool: ret"):
        played(Forgets(), TASK, "It is open.")


def test_an_unknown_tool_and_wrong_arguments_are_shown_to_the_model_and_counted() -> None:
    steps = played(
        ROOM, TASK, [message(pull={}), message(push={"force": "hard"}), message(push={"force": 4}), message("Open.")]
    )
    assert steps[0].messages[0]["content"].startswith("Error: there is no tool 'pull'.")
    assert steps[1].messages[0]["content"].startswith("Error: wrong arguments for push: force:")
    assert steps[-1].reward == 1
    assert {name: steps[-1].scores[f"tool_{name}"] for name in ("calls", "errors", "unknown")} == {
        "calls": 3.0,
        "errors": 2.0,
        "unknown": 1.0,
    }


def test_an_unreadable_call_is_shown_once_and_the_next_ends_the_episode_without_a_reward() -> None:
    told, ended = played(ROOM, TASK, [message(malformed="no JSON", push={"force": 5}), message(malformed="no JSON")])
    assert [one["content"] for one in told.messages] == ["it moves", "Error: a call can't be read: no JSON"]
    assert (ended.done, ended.reward, ended.scores["correct"], ended.scores["tool_malformed"]) == (True, 0.0, 0.0, 2.0)
    forgiving = Room(limits=ToolLimits(max_malformed=2))
    steps = played(
        forgiving, TASK, [message(malformed="a"), message(malformed="b"), message(push={"force": 5}), message("ok")]
    )
    assert steps[-1].reward == 1


@pytest.mark.parametrize(("force", "error"), [(101, ConnectionError), (-1, UserCodeExit)])
def test_a_fault_of_the_infrastructure_is_raised_for_the_episode_to_be_played_again(force: int, error: Any) -> None:
    with pytest.raises(error):
        played(ROOM, TASK, [message(push={"force": force})])


def lookup(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


def test_further_tools_come_from_the_recipe() -> None:
    with_lookup = Room(tools=({"type": "functions", "path": f"{__name__}:lookup"},))
    steps = played(with_lookup, TASK, [message(lookup={"word": "door"}), message(push={"force": 5}), message("Open.")])
    assert steps[0].messages[0]["content"] == "door is a word"
    assert steps[-1].reward == 1
    with pytest.raises(ConfigError, match=r"data\.tools: .*no_such"):
        Room(tools=({"type": "functions", "path": "no_such.module:f"},)).open()


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("1204", "1204", True),
        ("Let me see: 1 or 2.\n\n**1,204.**\n", "1204", True),
        ("OSLO", "Oslo", True),
        ("1203 or 1204", "1204", False),
        ("1204\nor so", "1204", False),
        ("-5", "5", False),
        ("", "0", False),
        ("   ", "", True),
    ],
)
def test_the_last_line_alone_is_the_answer(answer: str, expected: str, right: bool) -> None:
    assert says(answer, expected) == right


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("-3 - -4", "1"),
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("9" * 40 + "+1", "1" + "0" * 40),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "2 ** 9",
        "1 if 2 else 3",
        "__import__('os')",
        "True + 1",
        "1j * 2",
        "(" * 99,
        "1 / 0",
        "1e999",
        "",
        "x",
        "1" * 201,
    ],
)
def test_the_calculator_takes_nothing_else_and_no_more(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def queries() -> Queries:
    database = Database(databases=1, **SMALL)
    state = database.state(database.tasks("train")[0])
    assert isinstance(state, Queries)
    return state


def test_a_database_is_read_and_nothing_else() -> None:
    assert queries().query("SELECT COUNT(*) FROM staff") == "60"
    assert queries().query("SELECT id FROM staff ORDER BY id").endswith("19\n[more rows]")
    assert queries().query("SELECT id FROM staff WHERE 0") == "no rows"
    for statement in (
        "DELETE FROM staff",
        "DROP TABLE staff",
        "UPDATE staff SET salary = 0",
        "ATTACH '/tmp/x.db' AS x",
        "PRAGMA writable_schema = 1",
        "CREATE TABLE x (a)",
        "VACUUM INTO '/tmp/x.db'",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "nonsense",
    ):
        with pytest.raises(ToolError, match="SQLite: "):
            queries().query(statement)


def test_a_query_without_end_is_ended() -> None:
    with cpu_seconds_below(10), pytest.raises(ToolError, match="interrupted"):
        queries().query("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n")


def test_a_puzzle_refuses_moves_that_can_not_be_made() -> None:
    puzzle = SlidingPuzzle(**SMALL)
    task = puzzle.tasks("train")[0]
    board = puzzle.state(task)
    tiles = sorted(board._tiles)
    for direction in ("up", "down", "left", "right") * 5:
        try:
            board.move(direction)  # type: ignore[arg-type]
        except ToolError as told:
            assert str(told) == f"no tile can move {direction}"  # noqa: PT017
    assert sorted(board._tiles) == tiles
    assert played(puzzle, task, "It is solved.")[-1].reward == 0


def test_a_guess_that_comes_too_late_does_not_count() -> None:
    game = Guessing(highest=4, spare=0, train_size=2, test_size=0)
    task = game.tasks("train")[0]
    number, wrong_one = task.data.number, 1 if task.data.number != 1 else 2
    late = solution(
        *[("guess", {"number": wrong_one})] * task.data.guesses, ("guess", {"number": number}), answer=str(number)
    )
    steps = played(game, task, late)
    assert steps[-2].messages[0]["content"] == "Error: no guess is left"
    assert steps[-1].reward == 0
    assert played(game, task, str(number))[-1].reward == 0  # saying it is not guessing it


def test_traces_are_rows_with_the_tools_their_calls_and_their_results() -> None:
    traces = Traces(taskset={"type": "calculator", **SMALL}, test_size=4, limit=9)
    renderer = Renderer(tiny_tokenizer(), tools_as_text=True)
    groups = traces.groups(renderer)
    assert (len(groups["train"]), len(groups["test"])) == (9, 4)
    (trajectory,) = groups["train"][0].trajectories
    call, answer = [renderer.parse_reply(span.tokens) for span in trajectory.spans if span.trained]
    task = traces.taskset.tasks("train")[0]
    assert call["tool_calls"][0]["function"]["arguments"] == {"expression": task.data.term}
    assert answer["content"] == task.data.answer
    given = renderer.decode([token for span in trajectory.spans if not span.trained for token in span.tokens])
    assert f"<tool_response>\n{task.data.answer}\n</tool_response>" in given
    assert '"name": "calculate"' in given


def test_traces_of_a_task_set_without_gold_answers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Room has no gold answer to any task: define its gold\(\)"):
        Traces(taskset=ROOM).read()


def test_a_right_answer_that_earns_nothing_is_named() -> None:
    with pytest.raises(DataError, match="the gold answer to task 'room/0' earns 0"):
        Traces(taskset=Mistaken()).read()


class Mistaken(Room):
    def gold(self, task: Task) -> Answer:
        return "It is open."


def test_a_shuffled_board_is_never_in_order() -> None:
    tasks = SlidingPuzzle(size=2, moves=12, train_size=1, test_size=0).tasks("train")
    assert tasks[0].data.tiles != [1, 2, 3, 0], "twelve moves around a board of four places lead back to the beginning"
