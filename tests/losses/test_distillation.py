"""Supervised and distillation losses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.losses.batches import fill, random_groups, refilled
from tests.reference import distillation as slow
from tests.reference.plain import plain, plain_output
from whet.config import Component, SettingsError
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import DIVERGENCES
from whet.losses.distillation import (
    JSD,
    DistillationLoss,
    Divergence,
    Forward,
    Mixed,
    OnPolicyDistillationLoss,
    Reverse,
)
from whet.losses.sft import SFTLoss

FORMS = [
    DistillationLoss(divergence=divergence, tail=tail)
    for divergence in (Forward(), Reverse(), Mixed(), JSD())
    for tail in ("renormalise", "bucket")
]
every_form = pytest.mark.parametrize("loss", FORMS, ids=repr)


def make(seed: int = 0) -> tuple[Batch, ModelOutput]:
    return fill(random_groups(seed), seed)


@every_form
def test_a_student_that_agrees_costs_nothing_and_has_no_gradient(loss: DistillationLoss) -> None:
    batch, output = make()
    topk = batch.column("teacher_logprobs").clone().requires_grad_()
    value, _ = loss(replace(output, topk=topk), batch)
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    assert topk.grad is not None
    assert topk.grad.abs().max() < 1e-12


@every_form
@pytest.mark.parametrize("seed", range(3))
def test_divergences_are_never_negative(loss: DistillationLoss, seed: int) -> None:
    batch, output = make(seed)
    alone = torch.eye(len(batch), dtype=torch.bool)[batch.trained]
    assert all(loss(output, replace(batch, trained=token))[0].item() > 0 for token in alone)


@every_form
def test_a_token_that_the_teacher_excludes_is_no_problem(loss: DistillationLoss) -> None:
    batch, output = make()
    teacher = batch.column("teacher_logprobs").clone()
    teacher[:, 0] = -math.inf
    value, _ = loss(output, refilled(batch, teacher_logprobs=teacher))
    value.backward()
    finite = isinstance(loss.divergence, Forward | JSD)
    assert math.isfinite(value.item()) == finite
    assert not finite or output.topk.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_form
def test_top_k_that_holds_all_the_mass_leaves_a_finite_rest(loss: DistillationLoss, dtype: torch.dtype) -> None:
    batch, output = make()
    full = (torch.randn(len(batch), 4, generator=torch.Generator().manual_seed(0)).to(dtype)).log_softmax(1)
    batch = refilled(batch, teacher_logprobs=full.flip(1) + 1e-7)
    topk = (full + 1e-7).requires_grad_()
    value, _ = loss(replace(output, topk=topk), batch)
    value.backward()
    assert math.isfinite(value.item())
    assert topk.grad is not None
    assert topk.grad.isfinite().all()
    if dtype == torch.float64:
        b, now = plain(batch), plain_output(ModelOutput(output.logprobs, topk=topk))
        values = slow.distillation(b, now, now, Component(DIVERGENCES).name_of(type(loss.divergence)), loss.tail)
        assert value.item() == pytest.approx(sum(b.weight[t] * values[t] for t in b.trained), rel=0, abs=1e-10)
    renormalised = loss.model_copy(update={"tail": "renormalise"})
    assert value.item() == pytest.approx(renormalised(replace(output, topk=topk), batch)[0].item(), abs=1e-4)


@pytest.mark.parametrize("divergence", [Forward(), Reverse()], ids=repr)
def test_the_smallest_rest_is_one_in_a_million(divergence: Divergence) -> None:
    batch, output = make()
    full = batch.column("teacher_logprobs").log_softmax(1)
    half = (full - math.log(2)).requires_grad_()
    loss = DistillationLoss(divergence=divergence, tail="bucket")
    value, _ = loss(replace(output, topk=half), refilled(batch, teacher_logprobs=full))
    rest = -math.expm1(-1e-6)
    expected = {
        Forward(): math.log(2) + rest * math.log(2 * rest),
        Reverse(): 0.5 * -math.log(2) + 0.5 * math.log(0.5 / rest),
    }[divergence]
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_mixing_swaps_the_roles_in_jsd() -> None:
    batch, output = make()
    swapped = refilled(batch, teacher_logprobs=output.topk.detach())
    mirrored = replace(output, topk=batch.column("teacher_logprobs"))
    one = DistillationLoss(divergence=JSD(mix=0.3))(output, batch)[0].item()
    assert one == pytest.approx(DistillationLoss(divergence=JSD(mix=0.7))(mirrored, swapped)[0].item())


def test_distillation_reports_both_directions() -> None:
    batch, output = make(2)
    b, now = plain(batch), plain_output(output)
    for tail in ("renormalise", "bucket"):
        metrics = DistillationLoss(tail=tail)(output, batch)[1].result()
        for name, form in (("forward_kl", "forward"), ("reverse_kl", "reverse")):
            values = slow.distillation(b, now, now, form, tail)
            expected = sum(values[t] for t in b.trained) / len(b.trained)
            assert metrics[f"distillation/{name}"] == pytest.approx(expected)


def test_on_policy_distillation_reports_the_reverse_divergence_unclamped() -> None:
    batch, output = make(2)
    b, now = plain(batch), plain_output(output)
    metrics = OnPolicyDistillationLoss(clamp=0.1)(output, batch)[1].result()
    expected = sum(now.logprobs[t] - b.teacher_token_logprobs[t] for t in b.trained) / len(b.trained)
    assert metrics["distillation/reverse_kl"] == pytest.approx(expected)


def test_on_policy_distillation_of_a_teachers_impossible_token_is_bounded() -> None:
    batch, output = make(2)
    teacher = torch.where(batch.trained, -math.inf, batch.column("teacher_token_logprobs"))
    value, _ = OnPolicyDistillationLoss()(output, refilled(batch, teacher_token_logprobs=teacher))
    value.backward()
    expected = torch.where(batch.trained, 10.0 * batch.weight, 0.0)
    torch.testing.assert_close(output.logprobs.grad, expected)


def test_sft_reports_the_mean_over_tokens_whatever_the_weights() -> None:
    batch, output = fill(random_groups(1), 1, "sequence")
    b, now = plain(batch), plain_output(output)
    metrics = SFTLoss()(output, batch)[1].result()
    assert metrics["nll"] == pytest.approx(-sum(now.logprobs[t] for t in b.trained) / len(b.trained))
    assert metrics["entropy"] == pytest.approx(sum(now.entropy[t] for t in b.trained) / len(b.trained))
    assert metrics["loss"] != pytest.approx(metrics["nll"])
    assert "entropy" not in SFTLoss()(replace(output, entropy=None), batch)[1].result()


def test_needs_units_and_defaults() -> None:
    assert DistillationLoss().reads == {"topk_ids", "teacher_logprobs"}
    assert DistillationLoss().outputs == {"topk"}
    assert OnPolicyDistillationLoss().reads == {"teacher_token_logprobs"}
    assert SFTLoss().reads == frozenset()
    assert SFTLoss().unit == DistillationLoss().unit == OnPolicyDistillationLoss().unit == "token"
    assert DistillationLoss() == DistillationLoss(divergence=Forward(), tail="renormalise")
    assert Mixed().mix == JSD().mix == 0.5
    assert OnPolicyDistillationLoss() == OnPolicyDistillationLoss(clamp=10.0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Mixed, {"mix": 0.0}),
        (Mixed, {"mix": 1.0}),
        (JSD, {"mix": 0.0}),
        (JSD, {"mix": 1.0}),
        (DistillationLoss, {"mix": 0.5}),
        (DistillationLoss, {"tail": "drop"}),
        (OnPolicyDistillationLoss, {"clamp": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        kind(**settings)


def test_settings_near_the_edge_of_their_range_are_allowed() -> None:
    assert (
        Mixed(mix=0.01).mix,
        JSD(mix=0.99).mix,
        OnPolicyDistillationLoss(clamp=0.5).clamp,
    ) == (
        0.01,
        0.99,
        0.5,
    )
