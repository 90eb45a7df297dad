"""The whole way from a batch to a gradient, on a problem small enough to solve: two tokens from a vocabulary of few are
chosen one after the other, and every outcome can be listed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.groups import episode
from tests.learner.parts import VOCABULARY, cut, gradients, whole, worker
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task
from whet.losses.composite import PolicyLoss
from whet.losses.policy_gradient import CISPOClip, PPOClip, Reinforce

PROMPT = [3, 1, 4]


OUTCOMES = list(itertools.product(range(VOCABULARY), repeat=2))


def reward(first: int, second: int) -> float:
    """The second choice pays only after the right first one."""
    return (1.0 if first == 2 else -0.25) + (2.0 if (first, second) == (2, 5) else 0.0)


REWARDS = torch.tensor([reward(*outcome) for outcome in OUTCOMES], dtype=torch.float64)


def exact_gradient(folder: Path) -> dict[str, Tensor]:
    """Of the sum over all outcomes of probability times reward, by transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = torch.tensor([[*PROMPT, *outcome] for outcome in OUTCOMES])
    logprobs = model(input_ids=rows, use_cache=False).logits.log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    chosen = logprobs.gather(2, rows[:, len(PROMPT) :, None]).sum((1, 2))
    (chosen.exp() * REWARDS).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("surrogate", [Reinforce(), PPOClip(), CISPOClip()], ids=lambda s: type(s).__name__)
def test_the_expected_policy_gradient_is_the_gradient_of_the_expected_reward(llama: Path, surrogate: Any) -> None:
    learner, exact = worker(llama), exact_gradient(llama)
    rows = [episode([Span(PROMPT, False), Span(list(outcome), True)]) for outcome in OUTCOMES]
    batch = Batch.from_groups([Group("bandit", Task("bandit", []), rows)])
    logprobs = learner.score(whole(batch), {"logprobs"})[0]["logprobs"]
    batch.share = batch.per_sequence(logprobs).exp().double()  # each outcome by its probability
    batch.advantages = batch.per_token(REWARDS)

    found = gradients(learner, cut(batch, 600), PolicyLoss(surrogate=surrogate))
    assert found.keys() == exact.keys()
    scale = max(float(gradient.abs().max()) for gradient in exact.values())
    for name, gradient in exact.items():
        torch.testing.assert_close(-found[name], gradient, rtol=0, atol=1e-5 * scale)
