"""The choice of a replica for each request, counted in tokens."""

import random
from itertools import pairwise

import pytest

from benchmarks.routing import ByRequests, means
from whet.engines.placement import CachedTexts, Placement, beginnings

ALL = {0, 1, 2}
LONG, OTHER = list(range(100)), list(range(500, 600))


def test_the_samples_of_a_prompt_meet_and_another_prompt_goes_where_fewest_tokens_are_outstanding() -> None:
    placement = Placement(3, 8.0)
    places = [placement.begin(ALL, LONG, 10) for _ in range(8)]
    assert [place.number for place in places] == [0] * 8
    assert [place.cost for place in places] == [110] + [10] * 7, "the prompt is computed once"
    assert placement.begin(ALL, OTHER, 500).number == 1
    assert placement.begin(ALL, [1, 2, 3], 10).number == 2
    assert placement.outstanding == [180, 600, 13]


def test_a_busy_replica_loses_a_prompt_once_the_others_have_that_much_less_to_do() -> None:
    placement = Placement(2, 2.0)
    # With 100 tokens missing elsewhere, the first replica may have up to 200 outstanding tokens more.
    numbers = [placement.begin({0, 1}, LONG, 50).number for _ in range(6)]
    assert numbers == [0, 0, 0, 1, 1, 1]
    alone = Placement(2, 0.0)
    assert [alone.begin({0, 1}, LONG, 50).number for _ in range(4)] == [0, 1, 0, 1], "only outstanding tokens count"


def test_an_episode_stays_where_its_history_is_and_a_common_beginning_draws_nobody() -> None:
    placement = Placement(3, 2.0)
    system, replies = list(range(32)), [[7] * 40, [8] * 40, [9] * 40]
    prompts = [[*system, *range(start, start + 60)] for start in (100, 200, 300)]
    places = [placement.begin(ALL, prompt, 50) for prompt in prompts]
    assert [place.number for place in places] == [0, 1, 2], "32 of 92 tokens are cached at the first one"
    for place, prompt, reply in zip(places, prompts, replies, strict=True):
        placement.end(place)
        placement.answered(place, prompt, reply)
    for index in (2, 0, 1):
        history = [*prompts[index], *replies[index], 1, 2, 3]
        again = placement.begin(ALL, history, 50)
        assert again.number == index
        # 131 of its 135 tokens were sent or sampled there, 128 of them in whole blocks; replies have 40 tokens
        assert again.cost == 7 + 40


def test_completions_count_as_long_as_they_were_on_average_and_never_beyond_their_limit() -> None:
    placement = Placement(1, 8.0)
    for length in (10, 20):
        place = placement.begin({0}, [1], 1000)
        placement.end(place)
        placement.answered(place, [1], [5] * length)
    assert placement.begin({0}, [2], 1000).cost == 1 + 15
    assert placement.begin({0}, [3], 5).cost == 1 + 5


def test_images_are_part_of_a_prompt() -> None:
    placement = Placement(2, 8.0)
    placement.begin({0, 1}, [-1] * 64, 1, ["a cat"])
    assert placement.begin({0, 1}, [-1] * 64, 1, ["a dog"]).number == 1
    assert placement.begin({0, 1}, [-1] * 64, 1, ["a cat"]).number == 0


def test_nothing_is_cached_under_new_weights_or_on_a_replica_that_was_lost() -> None:
    for change in (Placement.clear, lambda placement: placement.drop(0)):
        placement = Placement(2, 8.0)
        placement.end(placement.begin({0, 1}, LONG, 10))
        assert placement.begin({0, 1}, LONG, 10).cost == 10
        change(placement)
        assert placement.begin({0, 1}, LONG, 10).number == 1


def test_the_record_of_cached_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedTexts, "most", 10)
    placement = Placement(1, 8.0)
    for i in range(30):
        placement.begin({0}, [i] * 40, 1)
    assert len(placement.cached._of[0]) == len(placement.cached._where) == 10
    assert placement.begin({0}, [29] * 40, 1).cost == 1, "the least recent texts are dropped first"


@pytest.mark.parametrize("weight", [0.0, 2.0, 8.0])
def test_the_choice_is_the_least_cost_over_all_replicas(weight: float) -> None:
    """The index of all replicas finds what asking each of them would find, ties included."""
    rng, placement = random.Random(3), Placement(40, weight)
    texts: list[set[int]] = [set() for _ in range(40)]
    chosen = set()
    for _ in range(400):
        serving = set(rng.sample(range(40), rng.randint(1, 40)))
        prompt = [rng.randrange(2) for _ in range(rng.choice([3, 16, 33, 48]))]
        ends = beginnings(prompt)
        cached = [max((end >> 32 for end in ends if end in own), default=0) for own in texts]
        costs = {n: placement.outstanding[n] + weight * (len(prompt) - cached[n]) for n in sorted(serving)}
        expected = min(costs, key=costs.__getitem__)
        place = placement.begin(serving, prompt, 5)
        assert place.number == expected
        texts[expected] |= {*ends}
        chosen.add(expected)
        if rng.random() < 0.5:
            placement.end(place)
        if rng.random() < 0.05:
            placement.drop(expected)
            texts[expected].clear()
    assert len(chosen) == 40
    for number in range(40):
        placement.drop(number)
    assert not placement.cached._where


def test_the_beginnings_of_a_long_text_are_few_and_of_a_continued_one_the_same() -> None:
    text = [7 * i % 1000 for i in range(50_000)]
    ends = beginnings(text)
    assert len(ends) < 300
    assert ends[-1] >> 32 == 50_000
    first = beginnings(text[:20_000])
    assert first[:-1] == ends[: len(first) - 1]
    assert beginnings(text, first=first) == ends
    assert beginnings(text, images=["a picture"])[0] != ends[0]
    lengths = [end >> 32 for end in ends]
    gaps = [(later - earlier) / later for earlier, later in pairwise(lengths) if later > 1024]
    assert max(gaps) <= 1 / 32


def test_nothing_is_outstanding_in_the_end_whatever_happens() -> None:
    rng, placement = random.Random(1), Placement(3, 8.0)
    places = []
    for _ in range(500):
        serving = set(rng.sample(range(3), rng.randint(1, 3)))
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        places.append((placement.begin(serving, prompt, rng.randint(1, 99)), prompt))
        assert places[-1][0].number in serving
        if rng.random() < 0.5:
            place, prompt = places.pop(rng.randrange(len(places)))
            placement.end(place)
            if rng.random() < 0.7:
                placement.answered(place, prompt, [1] * rng.randint(0, 99))
    for place, _ in places:
        placement.end(place)
    assert placement.outstanding == [0, 0, 0]


def test_long_and_short_prompts_mixed_are_balanced_better_than_by_requests() -> None:
    by_tokens, computed = means(Placement(4, 2.0), prompts=16, steps=2)
    by_requests, computed_before = means(ByRequests(4), prompts=16, steps=2)
    assert by_tokens - 1 < 0.7 * (by_requests - 1)
    assert computed < 2 * computed_before
