"""Best of n: sample n answers to each held-out task, keep the one that a scorer likes best, and write it as a row for
SFT. The scorer is the mean log-prob of an answer; with data=reward_model, `batch.reward` is the reward model's score.

python examples/best_of_n.py evaluation.limit=20
"""

import asyncio
import json
import sys
from pathlib import Path

from torch import Tensor

import whet
from whet.core.batch import Batch
from whet.losses.weighted import mean_per_sequence
from whet.run.policy import Policy

N = 4


async def score(policy: Policy, batch: Batch) -> Tensor:
    """Return a score for each answer, [S]: the mean log-prob of its tokens."""
    scored = await policy.score(batch, {"logprobs"})
    return mean_per_sequence(batch, scored["logprobs"])


async def main(overrides: list[str]) -> None:
    async with whet.open("quickstart", *overrides) as run:
        tasks = run.recipe.taskset.tasks("test")[: run.recipe.evaluation.limit]
        groups = await run.policy.sample(tasks, n=N)
        batch = run.policy.batch(groups)
        scores = (await score(run.policy, batch)).reshape(len(groups), N)
    best = [group.episodes[int(row.argmax())] for group, row in zip(groups, scores, strict=True)]

    rows = [
        {"prompt": group.task.prompt, "completion": episode.messages[-1]["content"]}
        for group, episode in zip(groups, best, strict=True)
    ]
    Path("best.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    mean = sum(episode.reward for group in groups for episode in group.episodes) / (N * len(groups))
    print(f"reward of a random answer {mean:.2f}, of the best of {N} {sum(e.reward for e in best) / len(best):.2f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
