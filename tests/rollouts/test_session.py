"""A session: what the model saw is recorded token by token, a rewritten history is a branch, budgets end episodes."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.chat.families import renderer_of
from tests.tiny import tiny_tokenizer
from whet.base.errors import ConfigError, DataError
from whet.chat.renderer import Renderer
from whet.core.types import Message, Status
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.episode import run_episode
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import LimitReached, PromptTooLong, Recording, Session
from whet.tasks.base import Observation, Step

RENDERER = Renderer(tiny_tokenizer())


class Counting:
    """Replies with its number; remembers what it was given."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.seconds = seconds

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        await asyncio.sleep(self.seconds)
        self.prompts.append(prompt)
        self.seeds.append(params.seed)
        tokens = [*RENDERER.encode_text(f"answer {len(self.prompts)}"), RENDERER.stop_token_ids[0]]
        return Completion(tokens, [-0.5] * len(tokens), (3, 4), "stop", cached=2)


def recording(generator: Counting | None = None, **sampling: Any) -> Recording:
    settings = Sampling(**({"max_prompt_tokens": 200, "max_new_tokens": 30, "max_turns": 8} | sampling))
    made: Any = generator or Counting()
    return Recording(made, RENDERER, settings, "s", seed=1)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def run(work: Awaitable[Any]) -> Any:
    async def go() -> Any:
        return await work

    return asyncio.run(go())


async def talk(session: Session, *texts: str) -> list[Message]:
    messages: list[Message] = []
    for text in texts:
        messages.append(user(text))
        messages.append((await session.reply(messages)).message)
    return messages


def test_every_turn_only_appends_and_the_generator_is_given_all_of_it() -> None:
    generator = Counting()
    session = Session(recording(generator))
    messages = run(talk(session, "one", "two", "three"))
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["answer 1", "answer 2", "answer 3"]
    for earlier, later in zip(generator.prompts, generator.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert session.tokens[: len(generator.prompts[-1])] == generator.prompts[-1]
    assert [span.trained for span in session.spans] == [False, True] * 3
    assert len(set(generator.seeds)) == 3, "each turn has a different seed"
    usage = session.recording.usage
    assert (usage.turns, usage.cached_tokens) == (3, 6)
    assert usage.prompt_tokens == sum(map(len, generator.prompts))


def test_a_history_that_is_rewritten_is_refused_and_makes_a_branch() -> None:
    generator = Counting()
    session = Session(recording(generator))
    messages = run(talk(session, "one", "two"))
    rewritten = [*messages[:2], user("something else")]
    with pytest.raises(DataError, match="does not continue what the model has seen"):
        run(session.reply(rewritten))
    line = session.branch(rewritten)
    run(line.reply(rewritten))
    assert line.spans[0].tokens == session.spans[0].tokens
    assert generator.prompts[2][: len(generator.prompts[0])] == generator.prompts[0]
    assert line.spans[1].tokens == session.spans[1].tokens, "the reply they share is not encoded again"
    assert [span.trained for span in line.spans] == [False, False, False, True], "nothing is trained twice"
    branches = session.recording.trajectories
    assert [len(branch.spans) for branch in branches] == [4, 4]
    assert branches[1].messages == [*rewritten, {"role": "assistant", "content": "answer 3"}]


def test_a_branch_of_a_branch_keeps_the_tokens_that_were_sampled() -> None:
    session = Session(recording())
    messages = run(talk(session, "one", "two", "three"))
    line = session.branch([*messages[:4], user("something else")])
    assert len(session.recording.trajectories) == 1, "the second branch has no reply yet"
    second = line.branch([*messages[:2], user("another thing")])
    assert second.spans[1].tokens == session.spans[1].tokens
    assert [len(other.spans) for other in (line, second)] == [4, 2]


def test_a_conversation_of_its_own_begins_a_branch_from_nothing() -> None:
    session = Session(recording())
    run(talk(session, "one"))
    other = [user("a sub-agent's question")]
    line = session.branch(other)
    assert line.spans == []
    run(line.reply(other))
    assert line.tokens[: len(RENDERER.render_prompt(other))] == RENDERER.render_prompt(other)


def test_other_tools_are_another_history() -> None:
    session = Session(recording())
    messages = run(talk(session, "one"))
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    assert not session.extended_by([*messages, user("two")], tools)
    assert session.extended_by([*messages, user("two")])
    assert session.branch([*messages, user("two")], tools).spans == []


def test_thoughts_may_be_left_out_of_what_is_sent_back() -> None:
    session = Session(recording())
    messages = run(talk(session, "one"))
    session._original[-1] = session._original[-1] | {"reasoning_content": "hm"}
    assert session.extended_by([*messages, user("two")])
    assert not session.extended_by([messages[0], messages[1] | {"reasoning_content": "ha"}, user("two")])


def test_nothing_new_is_no_question() -> None:
    session = Session(recording())
    messages = run(talk(session, "one"))
    with pytest.raises(DataError):
        run(session.reply(messages))


@pytest.mark.parametrize(
    ("sampling", "limit", "turns"),
    [({"max_turns": 2}, "turns", 2), ({"max_episode_tokens": 201}, "tokens", 8)],
)
def test_a_budget_that_is_used_up_ends_the_line(sampling: dict[str, int], limit: str, turns: int) -> None:
    session = Session(recording(**sampling))
    with pytest.raises(LimitReached) as reached:
        run(talk(session, *(["one " * 8] * 9)))
    assert reached.value.limit == limit
    assert session.recording.usage.turns <= turns
    assert session.spans[-1].trained, "no message is left without a reply"


def test_branches_share_the_budget_of_turns() -> None:
    session = Session(recording(max_turns=2))
    run(talk(session, "one", "two"))
    other = [user("three")]
    with pytest.raises(LimitReached):
        run(session.branch(other).reply(other))
    assert len(session.recording.trajectories) == 1, "a session without a reply has no trajectory"


class Slow:
    """An environment that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.closed = seconds, False

    async def start(self) -> Observation:
        return Observation([user("go")])

    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(self.seconds)
        return Step(reward=0.5, done=False, messages=[user("go on")])

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("environment", "generator"), [(0.3, 0.0), (0.0, 600.0)])
def test_the_clock_ends_an_episode_at_its_next_reply_or_in_it(environment: float, generator: float) -> None:
    slow = Slow(environment)
    episode = run(run_episode(slow, recording(Counting(generator), max_seconds=0.2)))
    assert (episode.status, episode.limit) == (Status.TRUNCATED, "seconds")
    assert slow.closed
    assert 0.2 <= episode.usage.seconds < 60


def test_each_reply_keeps_what_it_earned_and_the_episode_the_sum() -> None:
    episode = run(run_episode(Slow(0.0), recording(max_turns=3)))
    assert (episode.status, episode.limit) == (Status.TRUNCATED, "turns")
    assert [span.reward for span in episode.spans if span.trained] == [0.5, 0.5, 0.5]
    assert episode.reward == 1.5


def parts(*texts: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def test_messages_in_parts_are_recorded_as_parts_and_have_the_tokens_of_their_text() -> None:
    plain, cut = Session(recording()), Session(recording())
    run(talk(plain, "what is it", "and that"))
    messages = [parts("what ", "is it")]
    messages.append(run(cut.reply(messages)).message)
    assert cut.extended_by([user("what is it"), messages[1], user("x")]), "the same text"
    assert cut.extended_by([parts("wh", "at is it"), messages[1], user("x")])
    assert not cut.extended_by([parts("what is"), messages[1], user("x")])
    messages.append(parts("and", " that"))
    run(cut.reply(messages))
    assert cut.messages[0] == parts("what ", "is it")
    assert cut.messages[2] == parts("and", " that")
    assert cut.tokens == plain.tokens


def test_long_observations_in_parts_lose_their_middle_as_text() -> None:
    session = Session(recording(max_observation_tokens=60))
    messages = [user("hi")]
    messages.append(run(session.reply(messages)).message)
    run(session.reply([*messages, parts("a" * 500, "b" * 500)]))
    shown = session.messages[2]["content"]
    assert isinstance(shown, str)
    assert "characters left out]" in shown


def test_an_image_is_refused_in_words() -> None:
    image: Message = {"role": "user", "content": [{"type": "image", "url": "cat.png"}]}
    with pytest.raises(DataError, match=r"^message 2 of s has an image, where only text can be read; "):
        run(Session(recording()).reply([user("see"), image]))


class Calling:
    """Calls a tool in Kimi's format, always with the same id."""

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        call = "<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
        text = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|><|im_end|>"
        tokens = renderer_of("Kimi K2").tokenizer.encode(text, add_special_tokens=False)
        return Completion(tokens, [-0.5] * len(tokens), (3, 4), "stop")


def test_a_call_keeps_the_id_that_the_model_wrote_unless_the_episode_has_it() -> None:
    renderer, settings = renderer_of("Kimi K2"), Sampling(max_prompt_tokens=500, max_new_tokens=300, max_turns=8)
    generator: Any = Calling()
    session = Session(Recording(generator, renderer, settings, "s", seed=1))

    async def play() -> list[Message]:
        messages = [user("add")]
        for _ in range(2):
            reply = (await session.reply(messages)).message
            [call] = reply["tool_calls"]
            result: Message = {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "3"}
            messages += [reply, result]
        await session.reply(messages)
        return messages

    messages = run(play())
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [
        "functions.add:7",
        "call00001",
    ]
    text = renderer.decode(session.tokens)
    assert "## Return of functions.add:7" in text
    assert "## Return of functions.add:1" in text


def test_a_prompt_that_is_too_long_says_how_many_tools_it_describes() -> None:
    renderer, settings = renderer_of("Kimi K2"), Sampling(max_prompt_tokens=500, max_new_tokens=30)
    generator: Any = Counting()
    tools = [{"type": "function", "function": {"name": f"add_{number}", "parameters": {}}} for number in range(200)]
    for told, given in (
        ("with 200 tools described has", tools), ("with 1 tool described has", tools[:1]), ("prompt has", None),
    ):  # fmt: skip
        with pytest.raises(PromptTooLong, match=rf"{told} .*sampling\.max_prompt_tokens = 500"):
            run(Session(Recording(generator, renderer, settings, "s", seed=1)).reply([user("add " * 1000)], given))
    assert generator.prompts == []


def test_control_of_thinking_is_refused_where_thoughts_have_other_tags() -> None:
    for name, marks in (("Gemma 4", "<|channel>thought and <channel|>"), ("gpt-oss", "channels")):
        generator: Any = Counting()
        settings = Sampling(max_prompt_tokens=500, max_new_tokens=30, thinking="on")
        session = Session(Recording(generator, renderer_of(name), settings, "s", seed=1))
        with pytest.raises(ConfigError, match=re.escape(marks)):
            run(session.reply([user("q")]))
