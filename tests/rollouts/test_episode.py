"""Episodes of several turns: what they may add up to is known before the run starts, and kept to."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from tests.toy import toy_recipe
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.config import RecipeError
from whet.core.types import Episode, Message, Status
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.episode import run_episode
from whet.rollouts.observation import shorten
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording
from whet.tasks.base import Observation, Step

RENDERER = Renderer(tiny_tokenizer())


class Echo:
    """Says the same after each reply, without end."""

    def __init__(self, *texts: str) -> None:
        self.says: list[Message] = [{"role": "tool", "content": text} for text in texts]

    async def start(self) -> Observation:
        return Observation([{"role": "user", "content": "go"}])

    async def step(self, reply: Message) -> Step:
        return Step(done=False, messages=self.says)

    async def close(self) -> None: ...


class Short:
    """Replies with two letters, as far as it may; notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        self.asked.append(params.max_new_tokens)
        tokens = [*RENDERER.encode_text("ok"), RENDERER.stop_token_ids[0]][: params.max_new_tokens]
        reason: Any = "stop" if len(tokens) == 3 else "length"
        return Completion(tokens, [0.0] * len(tokens), (0, 0), reason)


def play(environment: Echo, **sampling: Any) -> tuple[Episode, list[int]]:
    generator: Any = Short()
    settings = Sampling(**({"max_prompt_tokens": 40, "max_new_tokens": 10, "max_turns": 3} | sampling))
    episode = run_episode(environment, Recording(generator, RENDERER, settings, "e", seed=0))
    return asyncio.run(episode), generator.asked


def observations(episode: Episode) -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


def test_what_fits_is_shown_as_it_is() -> None:
    episode, asked = play(Echo("a" * 50), max_observation_tokens=200)
    assert observations(episode) == ["a" * 50] * 2
    assert episode.status == Status.TRUNCATED
    assert asked == [10, 10, 10]


@pytest.mark.parametrize("texts", [["a" * 300 + "z"], ["b" * 200, "short", "c" * 250], ["é" * 5000]])
def test_a_long_observation_loses_its_middle_and_says_so(texts: list[str]) -> None:
    episode, _ = play(Echo(*texts), max_observation_tokens=250)
    assert [len(span.tokens) <= 250 for span in episode.spans if not span.trained][1:] == [True, True]
    shown = observations(episode)[: len(texts)]
    for text, seen in zip(texts, shown, strict=True):
        if len(text) < 20:
            assert seen == text
        else:
            assert seen.startswith(text[:20])
            assert seen.endswith(text[-20:])
            assert "characters left out]" in seen
    assert "".join(shown) in RENDERER.decode(episode.branches[0].tokens).replace("<|im_end|>\n<|im_start|>tool\n", "")


def test_more_results_than_have_room_end_the_episode_at_its_budget() -> None:
    episode, asked = play(Echo(*["r" * 60] * 100), max_observation_tokens=300)
    assert (episode.status, episode.limit, len(asked)) == (Status.TRUNCATED, "tokens", 1)
    assert episode.trained_tokens > 0, "the reply that asked for so much is learned from"


def test_shortening_renders_little_and_not_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = list[int]()

    def counted(history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        rendered.append(sum(len(message["content"]) for message in messages))
        return render(history, messages)

    render = RENDERER.render_next
    monkeypatch.setattr(RENDERER, "render_next", counted)
    results: list[Message] = [{"role": "tool", "content": "x y " * 1000} for _ in range(128)]
    fitting = shorten(results, [], RENDERER, 8000)
    assert fitting is not None
    tokens, _ = fitting
    assert 6000 < len(tokens) <= 8000
    assert len(rendered) <= 12
    assert max(rendered) < 100_000
    short: list[Message] = [{"role": "tool", "content": "short"}, {"role": "tool", "content": "z" * 5000}]
    fitting = shorten(short, [], RENDERER, 300)
    assert fitting is not None
    assert fitting[1][0]["content"] == "short", "a mark would be longer"


def test_a_limit_below_what_the_template_writes_is_an_error() -> None:
    with pytest.raises(DataError, match=r"more than sampling.max_observation_tokens = 10; raise it"):
        play(Echo("a"), max_observation_tokens=10)


def test_an_episode_never_gets_longer_than_it_may() -> None:
    whole, _ = play(Echo("a" * 20), max_observation_tokens=60, max_turns=9)
    for most in range(41, len(whole.branches[0].tokens)):
        episode, asked = play(Echo("a" * 20), max_observation_tokens=60, max_turns=9, max_episode_tokens=most)
        assert len(episode.branches[0].tokens) <= most
        assert episode.spans[-1].trained
        assert episode.status == Status.TRUNCATED
        assert min(asked) > 0


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (
            {"max_turns": 4},
            r"max_turns \* max_new_tokens .* = 3232 is more than a micro-batch holds, learner.max_tokens = 2",
        ),
        (
            {"max_turns": 2},
            r"= 1168 is more than the generator holds, generator.max_context = 256; lower it, or set sampl",
        ),
        (
            {"max_turns": 2, "max_episode_tokens": 300},
            r"sampling.max_episode_tokens = 300 is more than the generator holds",
        ),
        (
            {"max_turns": 2, "max_episode_tokens": 128},
            r"max_episode_tokens = 128 leaves no room for a reply after max_pro",
        ),
        (
            {"max_new_tokens": 200},
            r"sampling.max_prompt_tokens \+ sampling.max_new_tokens = 328 is more than the generator",
        ),
    ],
)
def test_turns_that_can_not_fit_are_refused_before_the_run(tmp_path: Path, sampling: dict[str, int], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        toy_recipe(tmp_path, sampling=sampling, learner={"max_tokens": 2048})


def test_turns_that_fit_are_taken(tmp_path: Path) -> None:
    toy_recipe(tmp_path, sampling={"max_turns": 2, "max_observation_tokens": 100})
    toy_recipe(tmp_path, sampling={"max_turns": 50, "max_episode_tokens": 256})


def test_an_environment_that_gives_no_messages_is_named_as_such() -> None:
    class Silent(Echo):
        async def start(self) -> Observation:
            return Observation([])

    class Text(Echo):
        async def step(self, reply: Message) -> Step:
            return Step(done=False, messages="more")  # type: ignore[arg-type]

    for environment in (Silent(), Echo()):
        with pytest.raises(DataError, match="environment of episode e gives the model no message to reply to"):
            play(environment)
    with pytest.raises(DataError, match="environment of episode e must give a list of messages, not 'more'"):
        play(Text())

    class Mistyped(Echo):
        async def start(self) -> Observation:
            return Observation([{"role": "asistant", "content": "?"}])

    with pytest.raises(DataError, match="environment of episode e gives the model must have the role 'assistant' in"):
        play(Mistyped())


def test_an_environment_that_changes_the_reply_changes_no_conversation() -> None:
    class Clears(Echo):
        async def step(self, reply: Message) -> Step:
            reply.clear()  # type: ignore[attr-defined]
            return await super().step(reply)

    episode, _ = play(Clears("more"))
    said = [message["content"] for message in episode.branches[0].messages if message["role"] == "assistant"]
    assert said == ["ok"] * 3


@pytest.mark.parametrize("repeats", ["conversation", "conversation without replies", "reply"])
def test_a_step_that_returns_what_the_model_has_seen_is_an_error(repeats: str) -> None:
    class Remembers(Echo):
        async def start(self) -> Observation:
            self.said: list[Message] = [{"role": "user", "content": "go"}]
            return Observation(list(self.said) if repeats == "reply" else self.said)

        async def step(self, reply: Message) -> Step:
            again: Message = {"role": "user", "content": "again"}
            self.said += [again] if "without" in repeats else [reply, again]
            return Step(done=False, messages=[reply, again] if repeats == "reply" else self.said)

    what = repeats.partition(" ")[0]
    with pytest.raises(DataError, match=rf"episode e returns .*{what} again, which the model has seen: return only"):
        play(Remembers())


def test_an_environment_may_ask_the_same_again() -> None:
    class Insists(Echo):
        async def step(self, reply: Message) -> Step:
            return Step(done=False, messages=(await self.start()).messages)

    episode, asked = play(Insists())
    assert [message["content"] for message in episode.messages] == ["go", "ok"] * 3
    assert len(asked) == 3


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": 7}, {"role": "tool", "content": {"found": 1}}, {}]
)
def test_a_message_without_a_text_is_named(message: Any) -> None:
    class Wrong(Echo):
        async def step(self, reply: Message) -> Step:
            return Step(done=False, messages=[message])

    with pytest.raises(DataError, match="environment of episode e gives the model must have a 'role' and a 'content'"):
        play(Wrong())


def test_a_step_with_messages_goes_on_and_one_without_ends_the_episode() -> None:
    more: Message = {"role": "user", "content": "more"}
    assert [Step(1.0).done, Step(messages=[more]).done, Step(done=True, messages=[more]).done] == [True, False, True]


def test_a_reward_among_the_scores_of_a_step_is_an_error() -> None:
    scores: Any
    for scores, says in (({"reward": 1.0, "correct": 1.0}, r"use Step\(reward="), (None, "must be a dict of numbers")):
        with pytest.raises(DataError, match=says):
            Step(scores=scores)
