"""Each call extends the right branch of the episode, or begins one."""

import asyncio
from typing import Any

import pytest

from tests.endpoint.agents import RENDERER, Scene, scene
from tests.endpoint.test_api import ADD, run, user
from whet.endpoint.request import Question


def shape(at: Scene) -> list[list[bool]]:
    """Return for each branch whether its spans are trained."""
    return [[span.trained for span in branch.spans] for branch in at.recording.trajectories]


def test_a_sub_agent_with_its_own_history_is_a_branch_and_the_first_branch_continues() -> None:
    history = [{"role": "system", "content": "You search."}, user("trains to Rome")]

    async def chat(at: Scene) -> None:
        await at.chat("plan the trip")
        await at.chat(*history)
        await at.chat("plan the trip", "ok", "it leaves at 8")
        await at.chat(*history, {"role": "assistant", "content": "ok"}, user("and back"))
        assert shape(at) == [[False, True, False, True]] * 2

    run("ok", chat)


def test_a_rewritten_history_is_a_branch_that_keeps_the_common_messages_as_context() -> None:
    async def chat(at: Scene) -> None:
        await at.chat("one")
        await at.chat("one", "ok", "two")
        await at.chat("one", "ok", "another")
        await at.chat("summary of all that")
        assert shape(at) == [[False, True, False, True], [False, False, False, True], [False, True]]
        first, second, _ = at.recording.trajectories
        assert second.spans[1].tokens == first.spans[1].tokens

    run("ok", chat)


def test_other_tools_begin_a_branch() -> None:
    async def chat(at: Scene) -> None:
        await at.chat("one", tools=[ADD])
        await at.chat("one", "ok", "two")
        assert len(at.recording.trajectories) == 2

    run("ok", chat)


def test_white_space_and_missing_reasoning_do_not_begin_a_branch() -> None:
    async def chat(at: Scene) -> None:
        await at.chat("one")
        await at.chat("one", "so", "two")
        assert shape(at) == [[False, True, False, True]]
        assert at.recording.trajectories[0].messages[1]["reasoning_content"] == "hm"

    run("hm</think> so \n", chat, thinking="on")


def test_simultaneous_calls_are_answered_concurrently_and_each_is_recorded_once() -> None:
    async def go() -> None:
        async with scene("ok", max_turns=8) as at:
            await at.chat("one")
            at.model.gate.clear()
            calls = [asyncio.create_task(at.chat("one", "ok", "vote")) for _ in range(4)]
            while at.model.sampling < 4:
                await asyncio.sleep(0.01)
            at.model.gate.set()
            assert [call.status_code for call in await asyncio.gather(*calls)] == [200] * 4
            assert sorted(shape(at)) == [[False, False, False, True]] * 3 + [[False, True, False, True]]
            assert len({params.seed for params in at.model.requests}) == 5, "votes must differ"

    asyncio.run(go())


def test_a_repeated_call_gets_another_sample_but_a_retry_the_same_answer() -> None:
    async def chat(at: Scene) -> None:
        first = (await at.chat("one")).json()
        retry: Any = {"x-stainless-retry-count": "1"}
        body = {"model": "any", "messages": [{"role": "user", "content": "one"}]}
        again = (await at.http.post("/chat/completions", json=body, headers=retry)).json()
        assert again == first
        assert len(at.model.requests) == 1
        other = (await at.chat("one")).json()
        assert other["id"] != first["id"]
        assert shape(at) == [[False, True]] * 2

    run("ok", chat)


def test_a_retry_during_the_first_call_joins_it() -> None:
    async def chat(at: Scene) -> None:
        at.model.gate.clear()
        body = {"model": "any", "messages": [{"role": "user", "content": "one"}]}
        first = asyncio.create_task(at.http.post("/chat/completions", json=body))
        while not at.model.sampling:
            await asyncio.sleep(0.01)
        retry = asyncio.create_task(
            at.http.post("/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
        )
        (call,) = at.conversations._calls
        while call.waiting < 2:
            await asyncio.sleep(0.01)
        first.cancel()
        while call.waiting > 1:
            await asyncio.sleep(0.01)
        at.model.gate.set()
        assert (await retry).status_code == 200
        assert shape(at) == [[False, True]]
        assert len(at.model.requests) == 1

    run("ok", chat)


def test_a_retry_during_the_cancellation_of_its_call_is_a_new_call() -> None:
    async def chat(at: Scene) -> None:
        at.model.gate.clear()
        question = Question([user("one")])
        first = asyncio.create_task(at.conversations.answer(question, repeated=False))
        while not at.model.sampling:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)  # the client has disconnected, and the job is cancelled but has not ended
        at.model.gate.set()
        assert (await at.conversations.answer(question, repeated=True)).message["content"] == "ok"
        assert shape(at) == [[False, True]]

    run("ok", chat)


def test_a_session_of_200_turns_is_one_branch_whose_history_is_never_rendered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered: list[int] = []
    render_next = RENDERER.render_next

    def counted(history: Any, messages: Any) -> list[int]:
        rendered.append(len(messages))
        return render_next(history, messages)

    monkeypatch.setattr(RENDERER, "render_next", counted)

    async def chat(at: Scene) -> None:
        messages: list[str] = []
        for turn in range(200):
            messages += [f"turn {turn}"]
            answer = await at.chat(*messages)
            assert answer.status_code == 200, answer.text
            messages += ["ok"]
        assert shape(at) == [[False, True] * 200]
        assert rendered == [1] * 199

    run("ok", chat, max_turns=200)
