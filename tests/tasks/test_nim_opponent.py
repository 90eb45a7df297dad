"""Games of Nim against another model, over HTTP: it sees what a player in its seat sees, and its failures are never a
reward."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.chat_server import ChatServer, chat_server
from whet.config import SettingsError
from whet.core.types import Message, Task
from whet.tasks.base import Step, called
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.judges.judge import JudgeError
from whet.tasks.self_play import Heap, Nim, perfect_move

Answer = Callable[[dict[str, Any]], str | int]


def heap_of(body: dict[str, Any]) -> int:
    return int(re.findall(r"Stones: (\d+)", body["messages"][-1]["content"])[-1])


def perfect(body: dict[str, Any]) -> str:
    return str(perfect_move(heap_of(body), 3))


def game(answer: Answer, heap: int, moves: Sequence[int]) -> tuple[Step, ChatServer, Task[Heap]]:
    replies: list[Message] = [{"role": "assistant", "content": str(move)} for move in moves]
    with chat_server(answer) as server:
        nim = Nim(stones=9, games=1, opponent="model", server={"url": server.url, "model": "m", "retries": 1})  # type: ignore[arg-type]
        [task] = [task for task in nim.tasks("train") if task.data.stones == heap]

        async def played() -> Step:
            environments = nim.open()
            try:
                return (await play(environments.make(task), replies))[1]
            finally:
                await called(environments.close)

        return asyncio.run(played()), server, task


def test_a_policy_that_plays_well_wins_and_another_loses() -> None:
    step, server, task = game(perfect, 6, [2, 3])
    assert (step.reward, step.scores) == (1.0, {"legal": 1.0, "correct": 1.0, "won_against_model": 1.0})
    assert server.seen[0]["messages"] == [
        {"role": "user", "content": str(task.prompt[0]["content"]).replace("Stones: 6", "Stones: 4")}
    ]
    step, _, _ = game(perfect, 6, [1, 1])
    assert (step.reward, step.scores["won_against_model"]) == (0.0, 0.0)


def test_the_model_may_begin_and_sees_the_whole_game() -> None:
    step, server, task = game(lambda body: "<think>hm</think> 1", 8, [3, 3])
    assert step.reward == 1.0
    assert task.data.seat == "second"
    first, second = (body["messages"] for body in server.seen)
    assert first == task.prompt
    assert second[len(first) :] == [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "The other player takes 3.\nStones: 4"},
    ]


@pytest.mark.parametrize("reply", ["5", "0", "one", "1 or 2"])
def test_a_reply_of_the_model_that_is_no_legal_move_takes_one_stone(reply: str) -> None:
    step, server, _ = game(lambda body: reply, 7, [3, 3])
    assert step.reward == 1.0
    assert len(server.seen) == 1


@pytest.mark.parametrize("answer", [500, "", "<think>never ends"], ids=str)
def test_a_model_that_fails_is_never_a_reward(answer: str | int) -> None:
    with pytest.raises(JudgeError, match=r"the opponent at http://.* gave no answer for nim/train/model/6/0, move 1"):
        game(lambda body: answer, 6, [2, 3])


def test_test_games_are_against_players_by_rules() -> None:
    server = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    nim = Nim(opponent="model", server=server)  # type: ignore[arg-type]
    assert {task.data.opponent for task in nim.tasks("test")} == {"random", "perfect"}
    assert {task.data.opponent for task in nim.tasks("train")} == {"model"}
    environments = IsolatedEnvironments(nim.open())
    asyncio.run(environments.close())


@pytest.mark.parametrize(
    "settings",
    [
        {"opponent": "model"},
        {"server": {"url": "http://127.0.0.1:9/v1", "model": "m"}},
        {"opponent": "model", "server": {"url": "http://127.0.0.1:9/v1", "model": "m", "verdict": "logprobs"}},
        {"opponent": "model", "server": {"model": "policy"}},
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"belong together|is for judges|only a judge may be the policy"):
        Nim(**settings)
