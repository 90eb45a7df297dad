"""The gradient of every algorithm's objective is the step's gradient, however the step is laid out and split."""

import asyncio
import random
from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from pydantic import TypeAdapter

from tests.groups import group
from tests.learner.parts import VOCABULARY, assert_layout_does_not_matter, whole
from whet.algorithms.base import Algorithm
from whet.algorithms.registry import ALGORITHMS
from whet.config import Component
from whet.core.batch import Batch
from whet.core.types import Group
from whet.learner.base import Top

AnyAlgorithm = Annotated[Algorithm, Component(ALGORITHMS)]
PAIRED = {"dpo", "online_dpo", "reward_model"}
LABELLED = {"kto"}
DPO_LOSSES = [{"form": form} for form in ("ipo", "hinge")] + [
    {"form": {"type": "robust", "label_smoothing": 0.1}, "sft_weight": 0.5}
]
TAUGHT = {"teachers": {"tutor": {"path": "other"}}}
OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    (name, TAUGHT if name.endswith("distillation") else {}) for name in ALGORITHMS
]
OBJECTIVES += [
    ("distillation", {**TAUGHT, "loss": {"type": "distillation", "divergence": form, "tail": tail}})
    for form, tail in (("reverse", "renormalise"), ("mixed", "bucket"), ("jsd", "bucket"))
]
OBJECTIVES += [
    ("on_policy_distillation", {**TAUGHT, **settings})
    for settings in (
        {"loss": "on_policy_distillation"},
        {"loss": "policy", "advantage": "teacher", "epochs": 2},
        {
            "loss": "policy",
            "group_size": 4,
            "advantage": {"type": "teacher", "weight": 0.5, "reward": "group"},
            "minibatches": 2,
        },
    )
]
OBJECTIVES += [
    ("grpo", {"weighting": weighting, "loss": {"type": "policy", **loss}})
    for weighting, loss in (
        ("token", {"kl": {"estimator": "k2", "unbiased_gradient": True}, "entropy_coefficient": 0.1}),
        ("sequence", {"surrogate": "gspo", "correction": {"type": "sequence_mask", "low": 0.05}}),
        ("constant", {"correction": {"type": "icepop", "low": 0.04}, "positive_nll": {"threshold": 0.4}}),
    )
]
OBJECTIVES += [
    (
        "ppo",
        {
            "advantage": {"type": "gae", "whiten": True, "kl": {}, "length_adaptive": 0.3, "critic_lambda": 1.0},
            "value_loss": {"type": "value", "clip": 0.01},
        },
    )
]
OBJECTIVES += [("reward_model", {"loss": {"type": "bradley_terry", "margin": "correct", "centre_coefficient": 0.2}})]
OBJECTIVES += [("dpo", {"loss": {"type": "dpo", **loss}}) for loss in DPO_LOSSES]
OBJECTIVES += [("kto", {"loss": {"type": "kto", "beta": 1.0, "desirable_weight": 1.5}})]
OBJECTIVES += [("dpo", {"loss": "simpo"}), ("dpo", {"loss": "orpo"}), ("reward_model", {"loss": "score_regression"})]


class TwoWorkers:
    """A learner whose policy and reference are different models from the start."""

    def __init__(self, workers: dict[str, Any]) -> None:
        self.says = {"logprobs": workers["language"], "reference_logprobs": workers["other"]}

    async def score(self, batch: Batch, columns: set[str]) -> dict[str, torch.Tensor]:
        return {name: self.says[name].score(whole(batch), {"logprobs"})[0]["logprobs"] for name in columns}


def labelled_groups(seed: int) -> list[Group]:
    """Five rows, one of which trains nothing."""
    dice = random.Random(seed)
    made = []
    for index in range(5):
        prompt, reply = ([dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 8))] for _ in range(2))
        made.append(group(f"g{index}", prompt, [reply], [float(index % 2)]))
    made[3].trajectories[0].spans[1].trained = False
    return made


def some_groups(paired: bool, seed: int) -> list[Group]:
    dice = random.Random(seed)

    def tokens() -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 8))]

    made = []
    for index in range(3):
        answers = [tokens() for _ in range(2 if paired else 3)]
        rewards = [1.0, 0.0] if paired else [dice.random() for _ in answers]
        made.append(group(f"g{index}", tokens(), answers, rewards))
    for one in made:
        for trajectory in one.episodes:
            trajectory.scores["correct"] = trajectory.reward
    return made


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "settings"), OBJECTIVES, ids=lambda value: str(value).replace("'", ""))
def test_gradient_of_every_objective_does_not_depend_on_the_layout(
    workers: dict[str, Any], name: str, settings: dict[str, Any], seed: int
) -> None:
    algorithm: Algorithm = TypeAdapter(AnyAlgorithm).validate_python({"type": name, **settings})

    def laid_out(groups: list[Group], share_prompts: bool = True) -> Batch:
        batch = Batch.from_groups(groups, share_prompts=share_prompts)
        logprobs = workers["other"].score(whole(batch), {"logprobs"})[0]["logprobs"]
        values = workers["critic"].score(whole(batch), {"values"})[0]["values"]
        batch = replace(batch, old_logprobs=logprobs, reference_logprobs=logprobs, values=values)
        batch.fill("teacher_token_logprobs", workers["tutor"].score(whole(batch), {"logprobs"})[0]["logprobs"])
        likeliest = workers["tutor"].score(whole(batch), {"topk_ids", "topk"}, Top(4, VOCABULARY))[0]
        batch.fill("topk_ids", likeliest["topk_ids"])
        batch.fill("teacher_logprobs", likeliest["topk"])
        batch.fill("reward_logprobs", workers["language"].score(whole(batch), {"logprobs"})[0]["logprobs"])
        batch.fill("reward_reference_logprobs", logprobs)
        asyncio.run(algorithm.prepare(batch, groups, {"policy": TwoWorkers(workers)}))  # type: ignore[dict-item]
        return batch.weigh(algorithm.weighting, 8)

    for role, loss in algorithm.losses.items():
        learner = workers[algorithm.roles[role].head]
        groups = labelled_groups(seed) if name in LABELLED else some_groups(name in PAIRED, seed)
        assert_layout_does_not_matter(learner, groups, loss, laid_out, 5, random.Random(seed))
        learner.accumulate(whole(laid_out(groups)), loss)
        assert any(bool(torch.any(p.grad != 0)) for p in learner.module.parameters() if p.grad is not None)
