"""Answers of a run become rows, and an account says why others don't."""

import json
from pathlib import Path

from whet.metrics.rollout_file import RolloutRecord, write_rollouts
from whet.prep.rollouts import write_rows


def answer(task: str, question: str, text: str, correct: float) -> RolloutRecord:
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    return RolloutRecord(
        step=1, uid=f"1:{task}", task=task, sample=0, prompt="", answer=text, messages=talk,  # type: ignore[arg-type]
        reward=correct, scores={"correct": correct},
    )  # fmt: skip


def test_answers_to_episodes_that_begin_differently_make_no_pair(tmp_path: Path) -> None:
    episodes = [answer("game", "A secret below 9.", "4", 1.0), answer("game", "A secret below 7.", "5", 0.0)]
    write_rollouts(tmp_path, 1, [*episodes, answer("sum", "2 + 2?", "4", 1.0), answer("sum", "2 + 2?", "5", 0.0)])
    account = write_rows(tmp_path, tmp_path / "rows.jsonl")
    assert "4 answers to 2 tasks: 2 used, dropped: 2 without a common prompt" in account
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["chosen"], row["rejected"]) == ("4", "5")
