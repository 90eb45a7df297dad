"""Each component against values by hand, and what composing leaves in the scores."""

from dataclasses import replace
from typing import Any

import pytest

from whet.base.errors import ConfigError, DataError
from whet.config import SettingsError
from whet.config.component import Component
from whet.core.types import Episode, Message, Span, Status, Trajectory, Usage
from whet.rollouts.rewards import (
    REWARDS,
    Clip,
    Gate,
    Language,
    Length,
    MalformedCalls,
    Product,
    Repetition,
    Reward,
    Score,
    Sum,
    compose,
)


def episode(text: str = "four", reward: float = 1.0, tokens: int = 4, **message: list[str]) -> Episode:
    messages: list[Message] = [
        {"role": "user", "content": "an example: два"},
        {"role": "assistant", "content": "два два два два"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": text, **message},  # type: ignore[typeddict-item]
    ]
    spans = [Span([1, 2], False), Span(list(range(tokens)), True, reward=reward)]
    return Episode([Trajectory(spans, messages)], reward=reward, scores={"style": 0.5}, usage=Usage(turns=1))


def test_registered_names_lead_to_their_classes() -> None:
    assert {name: Component(REWARDS).resolve(name)[0] for name in REWARDS} == {
        "score": Score,
        "sum": Sum,
        "product": Product,
        "gate": Gate,
        "clip": Clip,
        "length": Length,
        "repetition": Repetition,
        "language": Language,
        "malformed_calls": MalformedCalls,
    }


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (Score(), 2.0),
        (Score(name="style"), 0.5),
        (Score(name="absent", missing=-1.0), -1.0),
        (Score(weight=-3.0), -6.0),
        (Sum(of={"a": Score(), "b": Score(name="style", weight=2.0)}), 3.0),
        (Product(of={"a": Score(), "b": Score(name="style", weight=0.5)}), 0.5),
        (Gate(when=Score(), above=1.5, then=Score(name="style")), 0.5),
        (Gate(when=Score(), above=2.0, then=Score(name="style"), otherwise=-1.0), -1.0),
        (Gate(when=Score(weight=0.3), then=Score()), 2.0),
        (Gate(when=Score(weight=0.25), then=Score()), 0.0),
        (Clip(of=Score(), high=1.5), 1.5),
        (Clip(of=Score(), low=1.5, high=1.5), 1.5),
        (Clip(of=Score(weight=-1.0)), 0.0),
        (Clip(of=Score(weight=-1.0), low=-1.0), -1.0),
        (Length(free=4, limit=8), 0.0),
        (Length(free=2, limit=6), 0.5),
        (Length(free=0, limit=2, weight=-1.0), -1.0),
    ],
)
def test_values_by_hand(reward: Reward, value: float) -> None:
    assert reward(episode(reward=2.0)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0.0), ("a b c", 0.0), ("a b a b a b", 0.6), ("a a a", 0.5), ("A b", 0.0), ("很好很好吗", 0.25)],
)
def test_repetition_is_the_share_of_runs_that_were_there_before(text: str, value: float) -> None:
    assert Repetition(words=2)(episode(text)) == pytest.approx(value)


def test_repetition_is_of_four_words_where_nothing_else_is_chosen() -> None:
    assert Repetition()(episode("a b c d a b c d a")) == pytest.approx(2 / 6)


def test_only_what_the_model_said_counts_not_the_examples_in_its_prompt() -> None:
    assert Repetition(words=1)(episode("one two")) == 0
    assert Language(script="latin")(episode("four")) == 0


def test_the_replies_of_all_turns_and_branches_count() -> None:
    two = episode("four")
    two.branches[0].spans += [Span([3], False), Span([4], True)]
    two.branches[0].messages += [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "four five"}]
    two.usage = Usage(turns=2)
    branches = replace(two, branches=[*episode("four").branches, *episode("four five").branches])
    for each in (two, branches):
        assert Repetition(words=1)(each) == pytest.approx(1 / 3)
        assert Language(script="latin")(each) == 0


@pytest.mark.parametrize(("text", "value"), [("четыре", 1.0), ("ab бв", 0.5), ("42 + 1", 0.0), ("ß é", 0.0)])
def test_language_is_the_share_of_letters_of_another_script(text: str, value: float) -> None:
    assert Language(script="latin")(episode(text)) == pytest.approx(value)


def test_malformed_calls_are_counted_up_to_a_bound() -> None:
    malformed = episode(malformed_calls=["no name", "no JSON", "no end"])
    assert [MalformedCalls(most=most)(malformed) for most in (2, 4)] == [2, 3]
    assert [MalformedCalls()(one) for one in (episode(), malformed)] == [0, 1]


def test_the_scores_keep_the_grade_and_each_component_and_the_last_reply_is_paid_the_difference() -> None:
    one = episode(reward=1.0, tokens=8)
    style = Clip(of=Score(name="style", weight=4.0))
    compose(Sum(of={"task": Score(), "brevity": Length(free=0, limit=8, weight=-0.25), "style": style}), one)
    assert one.reward == pytest.approx(1.75)
    assert one.scores == {
        "style": 0.5, "graded": 1.0, "rewards/task": 1.0, "rewards/brevity": -0.25, "rewards/style": 1.0,
        "rewards/style/of": 2.0,
    }  # fmt: skip
    assert one.spans[-1].reward == pytest.approx(1.75)


def test_the_parts_of_a_gate_are_scores() -> None:
    one = episode()
    compose(Gate(when=Score(), then=Score(name="style")), one)
    assert one.scores == {"style": 0.5, "graded": 1.0, "rewards/when": 1.0, "rewards/then": 0.5}


def test_a_score_that_neither_the_task_set_nor_a_completed_episode_has_ends_the_run() -> None:
    mistyped = Sum(of={"task": Score(), "style": Score(name="stile")})
    with pytest.raises(ConfigError, match=r"'stile', only reward, style\. Did you mean 'style'.* set `missing`"):
        compose(mistyped, episode())
    optional, cut = Score(name="stile", missing=0.25), replace(episode(), status=Status.TRUNCATED)
    for reward, one, declared, value in (
        (optional, episode(), (), 0.25),
        (mistyped, cut, (), 1.0),
        (mistyped, episode(), ("style", "stile"), 1.0),
    ):
        compose(reward, one, declared)
        assert one.reward == value


@pytest.mark.parametrize("value", [None, "1", float("nan")])
def test_a_component_that_returns_no_number_is_named_with_its_place(value: object) -> None:
    class Own(Reward):
        def value(self, episode: Episode) -> float:
            return value  # type: ignore[return-value]

    with pytest.raises(DataError, match=r"what Own\.value \(.*test_rewards\.py:\d+\) returned is .*; it must be a fin"):
        Sum(of={"own": Own(weight=0.5)})(episode())


@pytest.mark.parametrize(
    ("kind", "settings", "refused"),
    [
        (Sum, {"of": {}}, "of: expected a mapping of at least 1, got a mapping of 0"),
        (Clip, {"of": Score(), "low": 2.0}, "low must not exceed high"),
        (Length, {"free": -1, "limit": 2}, "free: expected at least 0"),
        (Length, {"free": 0, "limit": 0}, "limit: expected greater than 0"),
        (Length, {"free": 2, "limit": 2}, "free must be below limit"),
        (Repetition, {"words": 0}, "words: expected at least 1"),
        (MalformedCalls, {"most": 0}, "most: expected at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type[Reward], settings: dict[str, Any], refused: str) -> None:
    with pytest.raises(SettingsError, match=refused):
        kind(**settings)
