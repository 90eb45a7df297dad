"""Comparisons of a generative reward model: verdicts and rewards. Empty answers earn nothing."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from whet.tasks.judges.comparison import (
    Answer,
    Comparison,
    LengthControl,
    base_rewards,
    length_rewards,
    pairs,
    read_comparison,
)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"score_1": 4, "score_2": 2, "ranking": 2}', (4, 2, 2)),
        (
            '```json\n{"score_1": 4, "score_2": 2, "ranking": 2}\n``` {"score_1": 1, "score_2": 1, "ranking": 1}',
            (4, 2, 2),
        ),
        ('first {"score_1": 1, "score_2": 1, "ranking": 1} then {"score_1": 5, "score_2": 3, "ranking": 1}', None),
        (
            'first {"score_1": 5, "score_2": 3, "ranking": 1} then {"score_1": 5.0, "score_2": 3, "ranking": 1}',
            (5, 3, 1),
        ),
        ('{"rubric": [], "overall": {"score_1": 3, "score_2": 3, "ranking": 4}}', (3, 3, 4)),
        ('{ not json {"score_1": 3, "score_2": 3, "ranking": 4}', (3, 3, 4)),
        ('{"score_1": 3, "score_2": 3}', None),
        ('{"score_1": "3", "score_2": 3, "ranking": 1}', None),
        ('{"score_1": 6, "score_2": 3, "ranking": 1}', None),
        ('{"score_1": 3, "score_2": 3, "ranking": 0}', None),
        ('{"score_1": NaN, "score_2": 3, "ranking": 1}', None),
        ('{"score_1": true, "score_2": 3, "ranking": 1}', None),
        ('{"score_1": 1e999, "score_2": 3, "ranking": 1}', None),
        ("[[1 is better]]", None),
        ("{" * 50_000, None),
        ('{"a":' * 50_000, None),
        ("", None),
    ],
)
def test_an_incomplete_verdict_is_rejected(text: str, verdict: tuple[float, float, float] | None) -> None:
    assert read_comparison(text) == (None if verdict is None else Comparison(*verdict))


def test_a_tie_is_broken_by_the_ranking_and_stays_in_its_range() -> None:
    assert Comparison(3, 3, 2).points == (4.5, 1.5)
    assert Comparison(5, 5, 1).points == (5, 2.5), "theirs gives 7.5"
    assert Comparison(2, 4, 1).points == (2, 4), "no tie"


def test_the_pairs_that_are_compared() -> None:
    assert pairs("circular", 3) == [(0, 1), (1, 2), (2, 0)]
    assert pairs("circular", 2) == [(0, 1), (1, 0)], "both orders"
    assert pairs("all", 3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs("circular", 1) == pairs("all", 1) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_base_is_the_mean_over_an_answers_comparisons(seed: int) -> None:
    dice = random.Random(seed)
    compared = pairs("circular", 4)
    verdicts = [Comparison(dice.randint(1, 5), dice.randint(1, 5), dice.randint(1, 6)) for _ in compared]
    points = [verdict.points for verdict in verdicts]
    expected = [(points[i][0] + points[i - 1][1]) / 2 for i in range(4)]
    assert base_rewards(4, compared, verdicts) == pytest.approx(expected)


def test_an_answer_without_a_comparison_is_in_the_middle() -> None:
    assert base_rewards(1, [], []) == [3.0]


CONTROL = LengthControl(thinking=0.5, answer=0.5, thinking_bonus=0.5, answer_bonus=0.5)


def test_short_answers_get_more_and_the_terms_are_centred() -> None:
    answers = [Answer("a" * n, "t" * (2 * n)) for n in (10, 20, 30)]
    found = length_rewards([3.0, 3.0, 3.0], answers, LengthControl(thinking=0.3, answer=0.4))
    assert found == pytest.approx([0.35, 0.0, -0.35])
    assert math.fsum(found) == pytest.approx(0.0)


def test_the_bonus_goes_to_the_shortest_only_if_it_is_among_the_best() -> None:
    answers = [Answer("a" * 10), Answer("a" * 20), Answer("a" * 30)]
    control = LengthControl(answer_bonus=0.5)
    assert length_rewards([5.0, 3.0, 1.0], answers, control) == [0.5, 0.0, 0.0]
    assert length_rewards([1.0, 3.0, 5.0], answers, control) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cheat", [Answer(""), Answer("  \n"), Answer("x", finished=False), Answer("", "t")])
def test_empty_and_cut_answers_get_no_bonus(cheat: Answer) -> None:
    honest = [Answer("a" * n, "t" * n) for n in (10, 20, 30)]
    found = length_rewards([3.0] * 4, [*honest, cheat], CONTROL)
    assert found[3] == min(0.0, *found[:3]), "the least of all terms"
    assert length_rewards([3.0] * 4, [*honest, cheat], CONTROL)[:3] == length_rewards([3.0] * 3, honest, CONTROL)


def test_a_single_valid_answer_gets_no_length_term() -> None:
    assert length_rewards([3.0, 3.0], [Answer("a"), Answer("")], CONTROL) == [0.0, 0.0]


@pytest.mark.parametrize("recorded", json.loads((Path(__file__).parent / "genrm_compare.json").read_text()))
def test_rewards_equal_the_rewards_of_gyms_genrm_compare(recorded: dict[str, Any]) -> None:
    """Recorded from ``aggregate_scores`` of nemo-gym 0.7.0, on non-empty answers and ties that stay in range: elsewhere
    theirs can be bought, and ours differs on purpose (see above)."""
    answers = [Answer(**answer) for answer in recorded["answers"]]
    verdicts = [read_comparison(text) for text in recorded["verdicts"]]
    base = base_rewards(len(answers), pairs(recorded["pairs"], len(answers)), [v for v in verdicts if v is not None])
    assert base == pytest.approx(recorded["base"])
    extra = length_rewards(base, answers, LengthControl(**recorded["control"]))
    assert [a + b for a, b in zip(base, extra, strict=True)] == pytest.approx(recorded["rewards"])
