"""The sequences whose gradient a loss knows to be exactly 0."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.losses.cases import CASES, POLICY, Case
from whet.core.batch import Batch
from whet.losses.composite import PolicyLoss
from whet.losses.weighted import WeightedLoss

PLAIN = ("ppo", "gspo", "cispo", "reinforce", "sapo", "dppo", "gmpo")
"""Surrogates that come with whet and scale with the advantage."""


def silenced(batch: Batch, seed: int) -> Batch:
    """The batch with advantages of 0 in a random half of its sequences."""
    dice = random.Random(seed)
    keep = torch.tensor([float(dice.random() < 0.5) for _ in range(batch.sequences)], dtype=torch.float64)
    factor = torch.where(batch.trained, keep[batch.sequence.clamp(min=0)], torch.ones(len(batch), dtype=torch.float64))
    return replace(batch, token_advantages=batch.column("advantages") * factor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_loss_calls_zero_has_no_loss_and_no_gradient(case: Case, seed: int) -> None:
    batch, output = case.make(seed)
    batch = silenced(batch, seed)
    loss: WeightedLoss = case.loss
    zero = loss.zero_gradient(batch)
    assert zero.shape == (batch.sequences,)
    value, _ = loss(output, batch)
    leaves = [leaf for leaf in (output.logprobs, output.entropy, output.values, output.topk) if leaf is not None]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    own = batch.trained & zero[batch.sequence.clamp(min=0)]
    assert all(not gradient[own].any() for gradient in found if gradient is not None)
    per_token, _ = loss.per_token(output, batch)
    assert not per_token[own].any()


@pytest.mark.parametrize(
    "case", [case for case in POLICY if case.name.split()[0] in (*PLAIN, "policy")], ids=lambda case: case.name
)
def test_an_advantage_of_zero_is_all_it_takes_where_nothing_else_trains(case: Case) -> None:
    batch, _ = case.make(1)
    batch = silenced(batch, 1)
    without = batch.per_sequence((batch.column("advantages") != 0).long()) == 0
    assert without.any()
    assert not without.all()
    expected = torch.zeros_like(without) if case.name == "policy all terms" else without
    assert torch.equal(case.loss.zero_gradient(batch), expected)


@pytest.mark.parametrize(
    "more", [{"kl": {}}, {"kl": {"coefficient": 0.0}}, {"entropy_coefficient": 0.1}], ids=lambda more: next(iter(more))
)
def test_what_trains_or_is_measured_at_every_token_is_computed(more: dict[str, Any]) -> None:
    batch, _ = CASES[0].make(1)
    assert not PolicyLoss.model_validate(more).zero_gradient(silenced(batch, 1)).any()


def test_answers_that_are_imitated_are_computed() -> None:
    batch, _ = CASES[0].make(1)
    batch = replace(batch, token_advantages=torch.zeros(len(batch)))
    threshold = float(batch.reward.median())  # a reward at the threshold is not imitated
    loss = PolicyLoss.model_validate({"positive_nll": {"coefficient": 0.1, "threshold": threshold}})
    zero = loss.zero_gradient(batch)
    assert torch.equal(zero, batch.reward <= threshold)
    assert not zero.all()
