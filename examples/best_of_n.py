"""Best of n: sample n answers to each held-out task, keep the one that a reward model likes best, and write it as a row
for SFT. docs/rlhf.md shows how a reward model is trained and exported.

python examples/best_of_n.py my-judge evaluation.limit=20
"""

import json
import sys
from pathlib import Path

import whet

N = 8


def main(reward_model: str, *overrides: str) -> None:
    with whet.open("rlhf-quickstart", f"data.model={reward_model}", *overrides) as run:
        tasks = run.recipe.taskset.tasks("test")[: run.recipe.evaluation.limit]
        groups = run.policy.sample(tasks, n=N)
    answers = [episode for group in groups for episode in group.episodes]
    best = [max(group.episodes, key=lambda episode: episode.scores["reward_model"]) for group in groups]

    rows = [
        {"prompt": group.task.prompt, "completion": episode.messages[-1]["content"]}
        for group, episode in zip(groups, best, strict=True)
    ]
    Path("best.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in best.jsonl")
    for name, episodes in (("all answers", answers), (f"the best of {N}", best)):
        right = sum(episode.scores["correct"] for episode in episodes) / len(episodes)
        print(f"accuracy of {name}: {right:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
