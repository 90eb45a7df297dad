import json

import pytest

from tests.show.runs import record, small_run
from whet.base.errors import DataError
from whet.metrics.rollout_file import rollout_path, rollout_steps, write_rollouts
from whet.watch import search as search_module
from whet.watch.search import PAGE, Query, search, whole_episode


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path / "run")


def place(text):
    step, offset = map(int, text.split(":"))
    return step, offset


def everything(run, query):
    """All pages of a search."""
    pages, start = [], None
    while not pages or start:
        page = search(run, rollout_steps(run), query, start)
        pages.append(page["rollouts"])
        start = place(page["next"]) if page["next"] else None
    return pages


def test_pages_hold_all_rollouts_the_newest_step_first(run):
    pages = everything(run, Query())
    assert [len(page) for page in pages] == [PAGE, PAGE]
    heads = [head for page in pages for head in page]
    assert [head["step"] for head in heads] == [step for step in range(8, 0, -1) for _ in range(5)]
    assert len({head["at"] for head in heads}) == 40


@pytest.mark.parametrize(
    ("query", "count"),
    [
        (Query(step=3), 5),
        (Query(step=99), 0),
        (Query(verdict="correct"), 16),
        (Query(step=3, verdict="wrong"), 3),
        (Query(status="failed"), 0),
        (Query(low=0.5), 16),
        (Query(high=0.5), 24),
        (Query(low=0.5, high=0.6), 0),
        (Query(text="4 LEGS"), 32),
        (Query(text="count <i>"), 40),
        (Query(text='"><img'), 8),
        (Query(text="LEG_COUNTING/train"), 40),
        (Query(text="nowhere"), 0),
    ],
)
def test_filters(run, query, count):
    assert sum(map(len, everything(run, query))) == count


def test_texts_of_other_alphabets_and_with_escapes_are_found(run):
    answers = [record(8, 0, pieces=["Größe\n", "\\frac"]), record(8, 1, pieces=["中文", '"q"'])]
    write_rollouts(run, 8, answers)
    for text in ("GRÖSSE", "größe", "\\frac", "中文", '"q"', "ße\n\\f"):
        assert len(everything(run, Query(step=8, text=text))[0]) == 1, text


def test_a_step_is_sorted_over_pages_and_missing_values_come_last(run):
    answers = [record(8, sample) for sample in range(PAGE + 5)]
    for i, answer in enumerate(answers):
        answer.reward = None if i == 3 else float(i * 7 % 11)
    write_rollouts(run, 8, answers)
    first, second = everything(run, Query(step=8, sort="reward"))
    rewards = [head["order"]["reward"] for head in first + second]
    assert rewards[:-1] == sorted(rewards[:-1], reverse=True)
    assert (rewards[-1], len(rewards)) == (None, PAGE + 5)
    with pytest.raises(DataError, match="choose a step"):
        search(run, [8], Query(sort="reward"))


def test_a_search_that_takes_long_stops_says_so_and_continues(run, monkeypatch):
    monkeypatch.setattr(search_module, "SECONDS", -1.0)
    page = search(run, rollout_steps(run), Query(text="legs"))
    assert (page["rollouts"], page["next"], page["note"]) == ([], "8:0", "searched back to step 8")
    monkeypatch.setattr(search_module, "SECONDS", 60.0)
    assert len(search(run, rollout_steps(run), Query(text="legs"), place(page["next"]))["rollouts"]) == PAGE


def test_damaged_lines_are_named_and_the_rest_is_found(run):
    path = rollout_path(run, 8)
    lines = path.read_text().splitlines(keepends=True)
    wrong = ["{torn\n", "[]\n", "\n", json.dumps({"step": 8, "texts": 3, "tokens": 4}) + "\n"]
    path.write_text("".join([lines[0], *wrong, *lines[1:], '{"half']))
    page = search(run, [8], Query())
    assert len(page["rollouts"]) == 5
    assert page["note"].startswith(f"damaged lines left out: step-000008.jsonl at byte {len(lines[0])}")


def test_a_file_that_vanishes_between_two_pages_is_passed_over(run):
    steps = rollout_steps(run)
    rollout_path(run, 7).unlink()
    assert {head["step"] for page in [search(run, steps, Query())] for head in page["rollouts"]} == {8, 6, 5, 4}


def test_an_episode_has_all_its_branches(run):
    answers = [record(8, sample) for sample in range(4)]
    answers[3].sample, answers[3].branch = 1, 1
    write_rollouts(run, 8, answers)
    heads = search(run, [8], Query())["rollouts"]
    found = whole_episode(run, place(heads[3]["at"]))
    assert [card["number"] for card in found["cards"]] == ["#1", "#1.1"]
    assert found["chosen"] == 1
    assert len(whole_episode(run, place(heads[0]["at"]))["cards"]) == 1


@pytest.mark.parametrize("where", [(8, 7), (8, 10**15), (99, 0)])
def test_a_place_that_is_not_the_start_of_a_rollout_is_refused(run, where):
    with pytest.raises(DataError, match="no rollout begins"):
        whole_episode(run, where)
    if where[0] == 8:
        with pytest.raises(DataError, match="no rollout begins"):
            search(run, [8], Query(), where)


def test_a_file_too_large_to_sort_is_refused(run, monkeypatch):
    monkeypatch.setattr(search_module, "_LONGEST", 1000)
    with pytest.raises(DataError, match="larger than"):
        search(run, [8], Query(step=8, sort="length"))
