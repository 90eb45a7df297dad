"""A loss of yours that reads a column of yours: imitate the best answers of each group (rejection sampling, as in RAFT,
arXiv 2304.06767). Plain `with`: every method blocks, as in a notebook.

python examples/own_loss.py steps=5
"""

import sys

import torch
from torch import Tensor

import whet
from whet.core.batch import Batch, ModelOutput
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class Imitation(WeightedLoss):
    """The negative log-likelihood of the answers that the column ``best`` marks, [S]."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"best"})

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        best = batch.per_token(batch.column("best"))
        return -best * at_trained(batch, output.logprobs), token_metrics(batch, {"best/share": best})


def best_answers(batch: Batch) -> Tensor:
    """Return 1 for each answer with the highest reward of a group whose rewards differ, else 0. [S]"""
    empty = batch.reward.new_zeros(len(batch.group_uids))
    highest = empty.scatter_reduce(0, batch.group, batch.reward, "amax", include_self=False)[batch.group]
    lowest = empty.scatter_reduce(0, batch.group, batch.reward, "amin", include_self=False)[batch.group]
    return ((batch.reward == highest) & (highest > lowest)).to(torch.float64)


def main(overrides: list[str]) -> None:
    with whet.open("quickstart", *overrides) as run:
        for step in range(1, run.recipe.steps + 1):
            groups = run.policy.sample(run.tasks.next(run.recipe.rollouts.prompts_per_step), n=8)
            batch = run.policy.batch(groups)
            batch.fill("best", best_answers(batch), axis="sequence")
            update = run.policy.update(batch.weigh("token"), Imitation())
            run.policy.publish()
            metrics = run.log(step, update)
            print(f"step {step}: reward {metrics['reward/mean']:.2f}, best answers {metrics['best/share']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
