import gc
import json
import math
import re

import pytest

from tests.show.runs import HOSTILE, record
from whet.base.errors import DataError
from whet.metrics.rollout_file import (
    RolloutRecord,
    drop_rollouts_after,
    read_rollouts,
    rollout_path,
    rollout_steps,
    write_rollouts,
)


def test_records_are_read_back_unchanged(tmp_path):
    records = [record(12, 0), record(12, 1, False, HOSTILE), record(12, 2, pieces=["é", "\u2028", "\n", "日"])]
    records[0].messages[1]["content"] = [{"type": "text", "text": "How many"}, {"type": "text", "text": " legs?"}]
    path = write_rollouts(tmp_path, 12, records)
    assert path.name == "step-000012.jsonl"
    assert path.read_bytes().count(b"\n") == 3
    assert list(read_rollouts(tmp_path, 12)) == records


def test_half_characters_are_read_back_unchanged_next_to_numbers_that_are_not_finite(tmp_path):
    half = record(12, 0, pieces=["a", "\ud83d", "é"])
    half.logprobs[0] = math.nan
    write_rollouts(tmp_path, 12, [half])
    half.logprobs[0] = None
    assert list(read_rollouts(tmp_path, 12)) == [half]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    bad = record(1, 0)
    bad.logprobs[0] = -math.inf
    bad.scores["x"] = math.nan
    write_rollouts(tmp_path, 1, [bad])
    json.loads(rollout_path(tmp_path, 1).read_text(), parse_constant=lambda name: pytest.fail(name))
    read = next(read_rollouts(tmp_path, 1))
    assert read.logprobs[0] is None
    assert read.differences[0] is None
    assert read.scores == {"correct": 1.0}


def test_missing_keys_take_defaults_and_unknown_ones_are_ignored(tmp_path):
    path = rollout_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_text('{"step": 3, "answer": "4", "tokens": [1, 2], "colour": "blue"}\n')
    read = next(read_rollouts(tmp_path, 3))
    assert (read.answer, read.correct, read.differences, read.mismatch) == ("4", None, [None, None], None)


def test_a_failed_rollout_is_neither_correct_nor_wrong():
    assert RolloutRecord(step=1, status="failed", reward=0.0).correct is None
    assert RolloutRecord(step=1, reward=0.0).correct is False
    assert RolloutRecord(step=1, reward=0.1, scores={"correct": 0.0}).correct is False


def test_a_missing_step_is_an_error_with_the_existing_steps(run_folder):
    with pytest.raises(DataError, match="8 steps from 1 to 8"):
        list(read_rollouts(run_folder, 99))


def test_an_invalid_line_is_an_error_that_names_it(tmp_path):
    path = rollout_path(tmp_path, 3)
    path.parent.mkdir()
    for line in ('{"step": 3', "[]", '{"answer": "no step"}'):
        path.write_text('{"step": 3}\n' + line + "\n")
        with pytest.raises(DataError, match="jsonl:2: "):
            list(read_rollouts(tmp_path, 3))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": "3"}, "step: expected a whole number, got text '3' in quotes"),
        ({"reward": "high"}, "reward: expected a number, got text 'high'"),
        ({"scores": 1}, "scores: expected a mapping, got the number 1"),
        ({"scores": {"correct": "yes"}}, "scores.correct: expected a number, got text 'yes'"),
        ({"tokens": [1, None]}, "tokens.1: expected a whole number, got null (nothing)"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: expected text or a list, got the number"),
        ({"turns": [{"tokens": "x"}]}, "turns.0.tokens: expected a whole number, got text 'x'"),
        ({"versions": [1, 2, 3]}, "versions: "),
    ],
)
def test_a_value_of_a_wrong_type_is_an_error_that_names_its_line_and_key(wrong, said, tmp_path):
    path = rollout_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_text('{"step": 3}\n' + json.dumps({"step": 3} | wrong) + "\n")
    with pytest.raises(DataError, match=re.escape(f"{path}:2: not a rollout record: {said}")):
        list(read_rollouts(tmp_path, 3))


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path):
    write_rollouts(tmp_path, 1, [record(1, 0)])

    def failing():
        yield record(1, 1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_rollouts(tmp_path, 1, failing())
    assert len(list(read_rollouts(tmp_path, 1))) == 1
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000001.jsonl"]


def test_each_record_is_written_before_the_next_one_is_made(tmp_path):
    """The records of a step of a hundred million tokens are larger than the memory of most machines."""

    def made():
        for sample in range(6):
            gc.collect()
            alive = sum(type(each) is RolloutRecord and each.step == 77 for each in gc.get_objects())
            assert alive <= 2
            yield record(77, sample)

    write_rollouts(tmp_path, 77, made())
    assert [each.sample for each in read_rollouts(tmp_path, 77)] == list(range(6))


def test_steps_that_will_be_repeated_are_dropped(run_folder):
    drop_rollouts_after(run_folder, 5)
    assert rollout_steps(run_folder) == [1, 2, 3, 4, 5]
    drop_rollouts_after(run_folder / "nothing", 5)
