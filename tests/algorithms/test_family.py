"""GRPO's relatives: advantages, loss and weights are those of their papers, as the slow oracles compute them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.losses.batches import fill, random_groups
from tests.reference import advantages as slow_advantages
from tests.reference import policy as slow
from tests.reference.plain import Plain, Said, plain, said
from whet.algorithms.cispo import CISPO
from whet.algorithms.dapo import DAPO
from whet.algorithms.dr_grpo import DrGRPO
from whet.algorithms.gdpo import GDPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.gspo import GSPO
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from whet.algorithms.rloo import RLOO
from whet.rollouts.filters import DynamicSampling

Surrogate = Callable[[Plain, Said, Said], list[float]]
Credit = Callable[[Plain], list[float]]
LONGEST = 7

FAMILY: dict[str, tuple[Any, Credit, Surrogate, str]] = {
    "grpo": (GRPO(), slow_advantages.group, slow.ppo, "token"),
    "dr_grpo": (DrGRPO(), lambda b: slow_advantages.group(b, divide=False), slow.ppo, "constant"),
    "dapo": (DAPO(), slow_advantages.group, lambda b, now, old: slow.ppo(b, now, old, 0.2, 0.28), "token"),
    "gspo": (GSPO(), slow_advantages.group, slow.gspo, "sequence"),
    "cispo": (CISPO(), slow_advantages.group, slow.cispo, "token"),
    "rloo": (
        RLOO(),
        lambda b: slow_advantages.group(b, "leave_one_out", divide=False),
        slow.reinforce,
        "constant",
    ),
    "reinforce_plus_plus": (
        ReinforcePlusPlus(),
        lambda b: slow_advantages.reinforce_plus_plus(b, baseline=True),
        slow.ppo,
        "token",
    ),
    "gdpo": (GDPO(), lambda b: slow_advantages.gdpo(b, {"correct": 1.0}), slow.ppo, "token"),
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

    batch = algorithm.weigh(batch, LONGEST)
    b, now = plain(batch), said(output)
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
    assert [type(keep) for keep in DAPO().group_filters] == [DynamicSampling]


def test_only_several_updates_per_rollout_need_the_old_logprobs() -> None:
    needing = {name for name, (algorithm, *_) in FAMILY.items() if "old_logprobs" in algorithm.needs}
    assert needing == {"dapo", "gspo", "cispo"}


def test_the_critic_is_trained_alone_while_it_warms_up() -> None:
    from whet.algorithms.ppo import PPO
    from whet.learner.config import OptimizerConfig

    ppo = PPO(critic_warmup=2, critic_lr=1e-3, epochs=2, minibatches=3)
    assert [set(ppo.losses_at(step)) for step in (0, 1, 2)] == [{"critic"}, {"critic"}, {"policy", "critic"}]
    assert ppo.optimizer("critic", OptimizerConfig(lr=1e-5)).lr == 1e-3
    assert ppo.optimizer("policy", OptimizerConfig(lr=1e-5)).lr == 1e-5
    assert (ppo.updates("policy", 10), ppo.updates("critic", 10)) == (48, 60)
    assert {"values", "returns", "old_logprobs", "advantages"} <= ppo.needs


def test_explained_variance_is_reported_for_the_whole_step() -> None:
    from whet.algorithms.ppo import PPO

    batch, _ = fill(random_groups(0), 0)
    assert batch.values is not None
    batch.returns = torch.where(batch.trained, batch.values, 0.0)
    assert PPO().report(batch).result() == {"value/explained_variance": pytest.approx(1.0)}
