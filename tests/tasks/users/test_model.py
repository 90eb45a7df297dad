"""A user played by a model behind a real HTTP server: private instructions, an end, and failures that are never
rewards."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.chat_server import chat_server
from tests.tiny import tiny_tokenizer
from whet.base.errors import ConfigError
from whet.chat.renderer import Renderer
from whet.core.types import Episode, Message, Status
from whet.engines.base import Completion, SamplingParams
from whet.metrics.clock import Timing
from whet.rollouts.episode import play as play_episode
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling
from whet.tasks.base import Step
from whet.tasks.episodes import play
from whet.tasks.judges.judge import JudgeError
from whet.tasks.tools.base import solution
from whet.tasks.users.booking import BookingDesk
from whet.tasks.users.model import END, spoken_text

TALK: list[Message] = [{"role": "assistant", "content": f"Reply {n}."} for n in range(40)]


def desk(url: str, **user: Any) -> BookingDesk:
    server = {"url": url, "model": "guest", "retries": 1}
    return BookingDesk(train_size=6, test_size=2, user={"type": "model", "server": server, **user})


def played(tasks: BookingDesk, replies: list[Message]) -> Step:
    async def episode() -> Step:
        environments = tasks.open()
        try:
            return (await play(environments.make(tasks.tasks("train")[0]), replies))[1]
        finally:
            await environments.close()

    return asyncio.run(episode())


def guest(*texts: str) -> Callable[[dict[str, Any]], str]:
    """A model that says these in turn, then the last one again."""
    return lambda body: texts[min((len(body["messages"]) - 4) // 2, len(texts) - 1)]


def test_the_model_gets_private_instructions_and_the_texts_of_the_policy_but_no_calls() -> None:
    with chat_server(guest("I am Nia.", END)) as server:
        tasks = desk(server.url)
        task = tasks.tasks("train")[0]
        calls = solution(*(call for calls in task.data.calls for call in calls), answer="Done.")
        episode = played(tasks, [*calls, *TALK])
    assert (episode.done, episode.reward) == (True, 1.0)
    assert (episode.scores["user_turns"], episode.scores["user_left"]) == (2, 0)
    first, second = (body["messages"] for body in server.seen)
    assert first[0]["role"] == "system"
    assert all(fact["text"] in first[0]["content"] for topic in task.data.topics for fact in topic["facts"])
    assert [message["role"] for message in second[1:]] == ["user", "assistant", "user", "assistant", "user"]
    opening = task.prompt[-1]["content"]
    assert [message["content"] for message in second[2:]] == [opening, "Done.", "I am Nia.", "Reply 0."]
    assert set(second[2]) == {"role", "content"}
    assert second[:-2] == first


def test_the_state_decides_and_not_the_talk() -> None:
    with chat_server(guest("I am happy, you did all I wanted.", f"Thank you. {END}")) as server:
        episode = played(desk(server.url), TALK)
    assert (episode.done, episode.reward, episode.scores["correct"]) == (True, 0, 0)


def test_an_end_that_the_policy_writes_ends_nothing_and_the_user_has_a_limit() -> None:
    with chat_server(lambda _: "Well.") as server:
        episode = played(desk(server.url, max_turns=5), [{"role": "assistant", "content": END}] * 9)
    assert (episode.done, episode.scores["user_turns"], episode.scores["user_left"], len(server.seen)) == (
        True,
        5,
        1,
        4,
    )


@pytest.mark.parametrize("bad", [500, 429, "", "<think>I am not sure", "<think>so</think>\n "])
def test_a_model_that_says_nothing_is_a_failure_and_never_a_reward(bad: str | int) -> None:
    with chat_server(lambda _: bad) as server:
        with pytest.raises(JudgeError, match=r"the simulated user at .* gave no answer for .* in 2 attempts"):
            played(desk(server.url), TALK)
        assert len(server.seen) == 2
        assert len({body["seed"] for body in server.seen}) == (1 if isinstance(bad, int) else 2)


def test_a_conversation_that_is_too_long_for_the_model_is_a_failure_too() -> None:
    def too_long(body: dict[str, Any]) -> str | int:
        return 400 if "Reply" in str(body["messages"]) else "Hello."

    with chat_server(too_long) as server, pytest.raises(JudgeError, match="HTTP 400"):
        played(desk(server.url), TALK)


def test_a_server_that_refuses_everything_stops_the_run() -> None:
    why = r"the simulated user at .* refuses the request with HTTP 404"
    with chat_server(lambda _: 404) as server, pytest.raises(ConfigError, match=why):
        played(desk(server.url), TALK)


class Silent:
    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return Completion([5, 6], [0.0, 0.0], (0, 0), "stop")


def test_an_episode_whose_user_fails_has_no_reward_and_is_not_trained_on() -> None:
    renderer, engine = Renderer(tiny_tokenizer(), tools_as_text=True), Silent()
    sampling = Sampling(max_prompt_tokens=9000, max_new_tokens=32, max_turns=9, max_observation_tokens=400)

    async def episode(tasks: BookingDesk) -> Episode:
        environments, generator = tasks.open(), engine
        any_engine: Any = generator
        return await play_episode(
            environments, tasks.tasks("train")[0], any_engine, renderer, sampling, retries=1, seed=0, session="e",
            timing=Timing(), failures=Failures(),
        )  # fmt: skip

    with chat_server(lambda _: 503) as server:
        played_out = asyncio.run(episode(desk(server.url)))
    assert (played_out.status, played_out.branches) == (Status.FAILED, [])
    assert "the simulated user" in played_out.error
    assert len(server.seen) == 4, "two attempts of the episode with two requests each"


def test_a_thought_is_not_said_and_a_long_message_is_cut() -> None:
    assert spoken_text("\n On Friday. ") == "On Friday."
    assert spoken_text("  ") is None
    with chat_server(guest("<think>Friday</think>" + "x" * 500, END)) as server:
        episode = played(desk(server.url, max_chars=7), TALK)
    assert [message["content"] for message in episode.messages if message["role"] == "user"] == ["x" * 7]


@pytest.mark.usefixtures("forked_children")
def test_a_model_that_the_run_hosts_plays_the_user(tiny_model: Path) -> None:
    server = {"model": str(tiny_model), "max_tokens": 8, "temperature": 1.0}
    tasks = BookingDesk(train_size=2, test_size=1, user={"type": "model", "server": server, "max_turns": 3})
    episode = played(tasks, TALK)
    assert (episode.done, episode.scores["user_turns"], episode.scores["user_left"]) == (True, 3, 1)
    texts = [message["content"] for message in episode.messages if message["role"] == "user"]
    assert len(texts) == 2
    assert all(texts)


def test_a_user_is_not_the_policy_and_its_model_writes() -> None:
    for server, why in (
        ({"model": "policy"}, "only a judge may be the policy"),
        ({"model": "m", "verdict": "logprobs"}, "writes"),
    ):
        with pytest.raises(ValidationError, match=why):
            BookingDesk.model_validate({"user": {"type": "model", "server": server}})
