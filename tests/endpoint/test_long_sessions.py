"""Sessions of hundreds of turns, whose agent replaces its history by a summary now and then: each reply is recorded
once, with exactly the tokens that were sampled, and what the endpoint keeps stays small."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import anthropic
import pytest

from tests.endpoint.agents import RENDERER, Scene, scene
from tests.endpoint.test_api import user
from tests.endpoint.test_branches import shape
from whet.endpoint import conversations
from whet.endpoint.conversations import Conversations
from whet.endpoint.request import Question

SYSTEM: Any = {"role": "system", "content": "You work on a task."}
Ask = Callable[[list[Any]], Awaitable[str]]


def numbered() -> Callable[[str], str]:
    """Return a model whose replies are all different."""
    numbers = count()
    return lambda _: f"reply {next(numbers)}"


def run(test: Callable[[Scene], Awaitable[None]], **sampling: Any) -> None:
    async def go() -> None:
        async with scene(numbered(), **sampling) as at:
            await test(at)

    asyncio.run(go())


async def by_chat(at: Scene, messages: list[Any]) -> str:
    answer = await at.openai.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content or ""


async def by_responses(at: Scene, messages: list[Any]) -> str:
    return (await at.openai.responses.create(model="m", input=messages)).output_text


async def by_messages(at: Scene, messages: list[Any]) -> str:
    root = at.address.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=at.address.api_key) as client:
        system, rest = messages[0]["content"], messages[1:]
        answer = await client.messages.create(model="m", max_tokens=200, system=system, messages=rest)
    return "".join(block.text for block in answer.content if block.type == "text")


async def work(ask: Ask, turns: int, every: int, keep: int = 0) -> None:
    """Work for some turns. After each ``every`` of them the history becomes a summary, and its last ``keep``
    messages."""
    history = [SYSTEM, user("the task")]
    for turn in range(1, turns + 1):
        history += [{"role": "assistant", "content": await ask(history)}, user(f"result {turn}")]
        if turn % every == 0:
            history = [SYSTEM, user(f"the task, and what was done until {turn}"), *history[len(history) - keep :]]


def replies(at: Scene) -> list[str]:
    """Return the trained replies, in the order of branches."""
    return [
        RENDERER.decode(list(span.tokens)).removesuffix("<|im_end|>")
        for branch in at.recording.trajectories
        for span in branch.spans
        if span.trained
    ]


@pytest.mark.parametrize(
    ("api", "turns", "every"),
    [
        (by_chat, 24, 8),
        (by_responses, 24, 8),
        (by_messages, 12, 4),
        pytest.param(by_chat, 300, 50, marks=pytest.mark.slow),
    ],
)
def test_each_summary_begins_a_branch_and_each_reply_is_recorded_once(api: Any, turns: int, every: int) -> None:
    async def go(at: Scene) -> None:
        await work(lambda history: api(at, history), turns, every)
        assert shape(at) == [[False, True] * every] * (turns // every)
        assert replies(at) == [f"reply {i}" for i in range(turns)]
        assert at.recording.usage.turns == turns

    run(go, max_turns=turns, max_prompt_tokens=2000)


def test_replies_that_a_summary_keeps_are_context_of_the_next_branch() -> None:
    async def go(at: Scene) -> None:
        await work(lambda history: by_chat(at, history), 12, 4, keep=4)
        assert shape(at) == [[False, True] * 4] * 3
        assert replies(at) == [f"reply {i}" for i in range(12)]
        begin = at.recording.trajectories[1].messages
        assert [message["content"] for message in begin[2:6]] == ["reply 2", "result 3", "reply 3", "result 4"]

    run(go)


def test_sub_agents_that_work_and_summarise_at_the_same_time_do_not_mix() -> None:
    async def go(at: Scene) -> None:
        async def agent(name: str) -> None:
            async def ask(history: list[Any]) -> str:
                return await by_chat(at, [*history[:2], user(name), *history[2:]])

            await work(ask, 9, 3)

        await asyncio.gather(*map(agent, "abcd"))
        assert shape(at) == [[False, True] * 3] * 12
        assert sorted(replies(at)) == sorted(f"reply {i}" for i in range(36))
        for branch in at.recording.trajectories:
            assert branch.messages[2]["content"] in list("abcd")

    run(go, max_turns=36)


def test_an_edited_system_prompt_begins_a_branch_and_the_old_one_can_be_continued() -> None:
    async def go(at: Scene) -> None:
        first = await by_chat(at, [SYSTEM, user("one")])
        other = {"role": "system", "content": "You are someone else."}
        past = [user("one"), {"role": "assistant", "content": first}, user("two")]
        await by_chat(at, [other, *past])
        await by_chat(at, [SYSTEM, *past])
        assert shape(at) == [[False, True, False, True], [False, True]]
        assert replies(at) == ["reply 0", "reply 2", "reply 1"]

    run(go)


def test_after_a_refusal_for_its_length_a_summary_goes_on_and_nothing_counts_as_cut() -> None:
    async def go(at: Scene) -> None:
        history = [SYSTEM, user("the task")]
        refusals = 0
        for turn in range(30):
            answer = await at.chat(*history)
            if answer.status_code == 400:
                assert answer.json()["error"]["code"] == "context_length_exceeded"
                refusals += 1
                history = [SYSTEM, user(f"summary {turn}")]
                continue
            history += [answer.json()["choices"][0]["message"], user("a result " * 4)]
        assert refusals > 2
        assert len(at.recording.trajectories) == refusals + 1
        assert len(replies(at)) == 30 - refusals == at.recording.usage.turns
        assert at.conversations.limit is None

    run(go, max_turns=30, max_prompt_tokens=200, max_episode_tokens=400, max_new_tokens=20)


def test_the_tokens_of_all_branches_have_a_limit_that_holds_for_calls_at_the_same_time_too() -> None:
    async def go(at: Scene) -> None:
        answers = [await at.chat(SYSTEM, user(f"part {i}")) for i in range(2)]
        taken = sum(len(branch.tokens) for branch in at.recording.trajectories)
        assert [answer.status_code for answer in answers] == [200, 200]
        answers = await asyncio.gather(*(at.chat(SYSTEM, user(f"part {i}")) for i in range(2, 10)))
        passed = [answer for answer in answers if answer.status_code == 200]
        assert 0 < len(passed) < 8
        refused = next(answer for answer in answers if answer.status_code != 200)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_reached")
        assert "used up its total_tokens" in refused.json()["error"]["message"]
        assert taken < sum(len(branch.tokens) for branch in at.recording.trajectories) <= 400
        assert at.conversations.limit == "total_tokens"

    run(go, max_prompt_tokens=100, max_new_tokens=60, max_total_tokens=400)


def test_the_last_reply_under_the_limit_of_all_branches_is_cut_there() -> None:
    async def go(at: Scene) -> None:
        first = await at.chat(user("a"))
        await at.chat(user("b" * 30))
        lengths = [len(branch.tokens) for branch in at.recording.trajectories]
        assert first.json()["choices"][0]["finish_reason"] == "stop"
        assert sum(lengths) == 83
        assert at.conversations.limit == "reply"

    run(go, max_prompt_tokens=80, max_total_tokens=83)


def test_of_answers_only_the_last_ones_are_kept_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_REMEMBERED", 500)

    async def go(at: Scene) -> None:
        history: list[Any] = [SYSTEM, user("the task")]
        for turn in range(16):
            last = list(history)
            history += [{"role": "assistant", "content": await by_chat(at, history)}, user(f"result {turn}")]
        kept = at.conversations._calls
        assert sum(len(call.job.result().prompt) for call in kept[:-1]) <= 500
        retried = await at.conversations.answer(Question(last), repeated=True)
        assert retried.message["content"] == "reply 15"
        assert at.recording.usage.turns == 16, "the retry sampled nothing"

    run(go, max_turns=17, max_prompt_tokens=2000)


def test_calls_in_flight_are_kept_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_REMEMBERED", 0)

    async def go(at: Scene) -> None:
        talk: Conversations = at.conversations
        at.model.gate.clear()
        first = asyncio.create_task(talk.answer(Question([user("one")]), repeated=False))
        await asyncio.sleep(0)
        others = [asyncio.create_task(talk.answer(Question([user(str(i))]), repeated=False)) for i in range(3)]
        await asyncio.sleep(0)
        again = asyncio.create_task(talk.answer(Question([user("one")]), repeated=True))
        while at.model.sampling < 4:
            await asyncio.sleep(0.01)
        at.model.gate.set()
        assert await first == await again
        await asyncio.gather(*others)
        assert at.recording.usage.turns == 4

    run(go)
