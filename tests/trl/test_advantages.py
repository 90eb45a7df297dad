"""From rewards to advantages: real TRL trainers sample from a tiny model and receive the rewards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.groups import episode
from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.grpo import GroupAdvantage
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task

pytestmark = pytest.mark.trl
GROUP = 4
REWARDS = torch.tensor([[0.0, 1.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [-1.0, 2.0, 0.25, 0.25]])
FORMAT = torch.tensor([[0.0, 10.0, 10.0, 0.0], [1.0, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
EPS = 1e-4  # TRL's


def theirs(kind: Any, config: Any, model: Path, folder: Path, rewards: list[Tensor], **settings: Any) -> Tensor:
    """[groups, answers]"""

    def told(values: Tensor, name: str) -> Any:
        def reward(completions: list[Any], **_: Any) -> list[float]:
            return values.flatten().tolist()

        reward.__name__ = name
        return reward

    count = rewards[0].numel()
    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=count,
        num_generations=GROUP,
        max_completion_length=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    prompts = [f"p{i}" for i in range(len(rewards[0]))]
    its = kind(
        model=str(model),
        reward_funcs=[told(values, f"reward_{i}") for i, values in enumerate(rewards)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    inputs = [{"prompt": prompt} for prompt in prompts for _ in range(GROUP)]
    return its._generate_and_score_completions(inputs)["advantages"].double().view(-1, GROUP)


def ours(estimator: Any, **scores: Tensor) -> Tensor:
    """[groups, answers]; every answer is one token."""
    rewards = scores.pop("reward", REWARDS)
    groups = []
    for index, row in enumerate(rewards.double().tolist()):
        answers = [
            episode(
                [Span([1], False), Span([2], True, [-1.0])],
                reward=reward,
                scores={name: float(values[index, sample]) for name, values in scores.items()},
            )
            for sample, reward in enumerate(row)
        ]
        groups.append(Group(f"{index}", Task(f"{index}", []), answers))
    batch = Batch.from_groups(groups)
    return estimator(batch).advantages[batch.trained].view(-1, GROUP)


def close(our: Tensor, their: Tensor) -> None:
    """Theirs are computed in float32."""
    assert our.abs().max() > 0.5
    torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [True, False], ids=["group std", "no division (Dr. GRPO)"])
def test_group_relative(scaled: bool, tiny_model: Path, tmp_path: Path) -> None:
    scale = "group" if scaled else "none"
    its = theirs(GRPOTrainer, GRPOConfig, tiny_model, tmp_path, [REWARDS], scale_rewards=scale)
    close(ours(GroupAdvantage(divide_by_std=scaled, eps=EPS)), its)


def test_leave_one_out(tiny_model: Path, tmp_path: Path) -> None:
    its = theirs(RLOOTrainer, RLOOConfig, tiny_model, tmp_path, [REWARDS], beta=0.0)
    close(ours(GroupAdvantage(baseline="leave_one_out", divide_by_std=False)), its)


def test_gdpo_normalises_each_reward_before_the_sum(tiny_model: Path, tmp_path: Path) -> None:
    its = theirs(
        GRPOTrainer,
        GRPOConfig,
        tiny_model,
        tmp_path,
        [REWARDS, FORMAT],
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=[1.0, 0.3],
    )
    estimator = GDPOAdvantage(components={"correct": 1.0, "format": 0.3}, eps=EPS)
    close(ours(estimator, correct=REWARDS, format=FORMAT), its)
