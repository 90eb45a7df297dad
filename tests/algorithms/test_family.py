"""The relatives of GRPO: advantages, loss and weights equal the papers' formulas, computed by slow oracles."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.losses.batches import fill, random_groups
from tests.reference import advantages as slow_advantages
from tests.reference import policy as slow
from tests.reference.plain import Plain, PlainOutput, plain, plain_output
from whet.algorithms.advantage import Advantage, Credit
from whet.algorithms.grpo import GRPO
from whet.algorithms.ppo import PPO
from whet.algorithms.presets import (
    CISPO,
    CLIP_COV,
    DAPO,
    DPPO,
    DR_GRPO,
    GDPO,
    GMPO,
    GSPO,
    REINFORCE_PLUS_PLUS,
    RLOO,
    SAPO,
)
from whet.core.batch import Batch
from whet.learner.optimizer_config import OptimizerConfig
from whet.rollouts.filters import DynamicSampling

Surrogate = Callable[[Plain, PlainOutput, PlainOutput], list[float]]
Slow = Callable[[Plain], list[float]]
LONGEST = 7

FAMILY: dict[str, tuple[Any, Slow, Surrogate, str]] = {
    "grpo": (GRPO(), slow_advantages.group, slow.ppo, "token"),
    "dr_grpo": (DR_GRPO, lambda b: slow_advantages.group(b, divide=False), slow.ppo, "constant"),
    "dapo": (DAPO, slow_advantages.group, lambda b, now, old: slow.ppo(b, now, old, 0.2, 0.28), "token"),
    "gspo": (GSPO, slow_advantages.group, slow.gspo, "sequence"),
    "cispo": (CISPO, slow_advantages.group, slow.cispo, "token"),
    "rloo": (
        RLOO,
        lambda b: slow_advantages.group(b, "leave_one_out", divide=False),
        slow.reinforce,
        "constant",
    ),
    "reinforce_plus_plus": (
        REINFORCE_PLUS_PLUS,
        lambda b: slow_advantages.reinforce_plus_plus(b, baseline=True),
        slow.ppo,
        "token",
    ),
    "sapo": (SAPO, slow_advantages.group, slow.sapo, "sequence"),
    "gmpo": (GMPO, slow_advantages.group, slow.gmpo, "sequence"),
    "dppo": (DPPO, lambda b: slow_advantages.group(b, divide=False), slow.dppo, "constant"),
    "clip_cov": (
        CLIP_COV,
        lambda b: slow_advantages.clip_cov(b, slow_advantages.group(b)),
        slow.ppo,
        "token",
    ),
    "gdpo": (GDPO, lambda b: slow_advantages.gdpo(b, {"correct": 1.0}), slow.ppo, "token"),
}


def share(b: Plain, weighting: str, row: Any) -> float:
    rows = [r for r in b.rows if r.tokens]
    return {
        "token": 1 / sum(len(r.tokens) for r in rows),
        "sequence": 1 / (len(rows) * max(len(row.tokens), 1)),
        "constant": 1 / (len(rows) * LONGEST),
    }[weighting]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_relative_of_grpo_is_what_its_paper_says(name: str, seed: int) -> None:
    algorithm, advantages, surrogate, weighting = FAMILY[name]
    batch, output = fill(random_groups(seed, (3, 2, 4)), seed)
    expected = advantages(plain(batch))
    batch.advantages = algorithm.estimator(batch).advantages
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-9)

    batch = batch.weigh(algorithm.weighting, LONGEST)
    b, now = plain(batch), plain_output(output)
    weights = [0.0] * b.length
    for row in b.rows:
        for t in row.tokens:
            weights[t] = share(b, weighting, row)
    assert batch.weight is not None
    assert batch.weight.tolist() == pytest.approx(weights)

    loss, _ = algorithm.losses["policy"](output, batch)
    values = surrogate(b, now, now)
    assert loss.item() == pytest.approx(sum(weights[t] * values[t] for t in b.trained), abs=1e-9)


def test_dapo_drops_groups_without_spread() -> None:
    assert [type(keep) for keep in DAPO.filters] == [DynamicSampling]


def test_only_several_updates_per_rollout_need_the_old_logprobs() -> None:
    needing = {name for name, (algorithm, *_) in FAMILY.items() if "old_logprobs" in algorithm.reads}
    assert needing == {"dapo", "gspo", "cispo", "sapo", "gmpo", "dppo", "clip_cov"}


def test_the_critic_is_trained_alone_while_it_warms_up() -> None:
    ppo = PPO(critic_warmup=2, critic_lr=1e-3, epochs=2, minibatches=3)
    assert [set(ppo.losses_at(step)) for step in (0, 1, 2)] == [{"critic"}, {"critic"}, {"policy", "critic"}]
    rates = {name: role.optimizer(OptimizerConfig(lr=1e-5)) for name, role in ppo.roles.items()}
    assert {name: optimizer and optimizer.lr for name, optimizer in rates.items()} == {"policy": 1e-5, "critic": 1e-3}
    assert {name: role.starts_at for name, role in ppo.roles.items()} == {"policy": 2, "critic": 0}
    assert {"values", "returns", "old_logprobs", "advantages"} <= ppo.reads


class CriticAdvantage(Advantage):
    """Every return equals the critic's value."""

    reads: ClassVar = frozenset({"values"})
    fills: ClassVar = frozenset({"advantages", "returns"})

    def estimate(self, batch: Batch) -> Credit:
        return Credit(torch.zeros_like(batch.column("values")), batch.column("values"))


def test_explained_variance_is_reported_for_the_whole_step() -> None:
    batch, _ = fill(random_groups(0), 0)
    assert batch.values is not None
    batch.values = torch.where(batch.trained, batch.values, 0.0)
    metrics = asyncio.run(PPO(advantage=CriticAdvantage()).prepare(batch, [], {}))
    assert metrics.result() == {"value/explained_variance": pytest.approx(1.0)}
