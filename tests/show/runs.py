"""Run folders as training writes them: a small one with hostile text in its rollouts, and one with every feature."""

from pathlib import Path

from whet.metrics.rollout_file import RolloutRecord, Turn, write_rollouts
from whet.metrics.sinks.jsonl import JSONLSink

RECIPE = """\
name: tiny
steps: 20
model: {name: someone/Tiny-1M}
data: {type: leg_counting}
algorithm: {type: grpo}
"""
HOSTILE = [
    "</script>",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "\x1b[2J",
    "\u202e",
    "\ud800",
    "[red]",
]


def record(step: int, sample: int, correct: bool = True, pieces: list[str] | None = None) -> RolloutRecord:
    pieces = pieces or ["So", " 4", " legs", ".\n"]
    sampled = [-0.5 - 0.1 * i for i in range(len(pieces))]
    return RolloutRecord(
        step=step,
        uid=f"{step}/0",
        task="leg_counting/train/3",
        sample=sample,
        prompt="How many legs has <b>a cat</b>?",
        answer="".join(pieces),
        data={"answer": "4", "question": "How many legs has <b>a cat</b>?"},
        messages=[
            {"role": "system", "content": "Count <i>legs</i>."},
            {"role": "user", "content": "How many legs has <b>a cat</b>?"},
            {"role": "assistant", "content": "".join(pieces)},
        ],
        turns=[Turn(len(pieces))],
        reward=float(correct),
        advantage=1.0 if correct else -1.0,
        scores={"correct": float(correct)},
        tokens=list(range(len(pieces))),
        texts=pieces,
        logprobs=list(sampled),
        learner_logprobs=[value + 0.01 * sample * i for i, value in enumerate(sampled)],
        versions=(step - 1, step - 1),
    )


def train_values(step: int) -> dict[str, float | int | str]:
    return {
        "reward/mean": 0.1 * step, "accuracy": 0.1 * step, "answer/length_mean": 30.0, "loss": 0.1 / step, "kl": 0.001,
        "entropy/approximate": 0.5, "clip/high": 0.01, "clip/low": 0.02, "gradient_norm": 0.4,
        "mismatch/token_mult_prob_error": 1.01, "time/generate": 2.0, "time/learn": 3.0, "time/step": 5.5,
        "time/tokens_per_second": 800.0,
    }  # fmt: skip


def evaluation_values(accuracy: float, n: int = 200) -> dict[str, float | int | str]:
    return {"evaluation/accuracy": accuracy, "evaluation/n": n, "evaluation/reward": accuracy}


def small_run(folder: Path) -> Path:
    """Eight steps, two evaluations, five answers of each step."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    sink = JSONLSink().open(folder, {})
    sink.write(0, {"run/parameters": 1_000_000, "run/device": "cpu"})
    sink.write(0, evaluation_values(0.2), "evaluation")
    for step in range(1, 9):
        sink.write(step, train_values(step) | ({"loss": float("nan")} if step == 5 else {}))
        answers = [record(step, sample, correct=sample % 2 == 0) for sample in range(4)]
        write_rollouts(folder, step, [*answers, record(step, 4, False, HOSTILE)])
    sink.write(8, evaluation_values(0.6), "evaluation")
    sink.close()
    return folder


def run_of_everything(folder: Path) -> Path:
    """Write a run with every part of a report: smoothed curves, limits and numbers beyond them, a band of evaluations,
    every phase of a step, answers that failed, were cut off, are long, or come without tokens."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE + "# </pre><script>alert(3)</script>\n")
    sink = JSONLSink().open(folder, {})
    sink.write(0, {"run/parameters": 134_515_008, "run/device": "cpu", "run/model": "owner/Tiny & Sons"})
    sink.write(0, evaluation_values(0.2) | {"evaluation/low": 0.15, "evaluation/high": 0.26}, "evaluation")
    for step in range(1, 15):
        values = train_values(step) | {"reward/mean": 0.05 * step, "accuracy": 0.05 * step, "answer/truncated": 0.3}
        values |= {"kl": 0.1 * step, "mismatch/kl": 1e-4 * step, "mismatch/max": 0.5, "time/publish": 0.25}
        values |= {"idle/generator": 0.5 - 0.02 * step, "idle/learner": 0.02 * step, "tokens/goodput": 0.9}
        values |= {"loss": float("nan")} if step in (5, 6) else {}
        values |= {"time/evaluate": 4.0, "time/step": 9.75} if step == 7 else {}
        sink.write(step, values)
        if step == 7:
            sink.write(7, evaluation_values(0.35) | {"evaluation/pass_at_2": 0.5}, "evaluation")
    sink.write(14, evaluation_values(0.6), "evaluation")
    sink.close()
    for step, more in ((7, []), (14, _odd(14))):
        answers = [record(step, sample, correct=sample % 2 == 0) for sample in range(6)]
        write_rollouts(folder, step, [*answers, record(step, 6, False, HOSTILE), *more])
    return folder


def _odd(step: int) -> list[RolloutRecord]:
    long = record(step, 7, False, ["word "] * 20)
    long.status, long.scores, long.versions = "truncated", {"correct": 0.0, "<b>format</b>": 0.25}, (step - 1, step)
    failed = RolloutRecord(step=step, task="broken", sample=8, prompt="p" * 300, status="failed", error="<i>no\x1b[2J")
    untold = RolloutRecord(step=step, task="untold", sample=9, prompt="?", answer="plain\n  <b>text</b>", reward=0.5)
    return [long, failed, untold]
