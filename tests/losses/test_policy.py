"""Policy losses, their metrics and their extremes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.losses.batches import fill, random_groups
from tests.reference import policy as slow
from tests.reference.plain import plain, plain_output
from whet.config import Component, SettingsError, load
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import CORRECTIONS, DIVERGENCES, FORMS, LOSSES, SURROGATES
from whet.losses.composite import PolicyLoss, PositiveNLL
from whet.losses.kl import KL
from whet.losses.off_policy import TIS, IcePop, SequenceMask, mismatch_metrics
from whet.losses.policy_gradient import CISPOClip, GSPOClip, PolicyGradient, PPOClip, Reinforce
from whet.losses.trust_region import DPPOMask, GMPOClip, KLCovPenalty, SAPOGate

SURROGATE_EXAMPLES = [
    *(PPOClip(), PPOClip(dual_clip=3.0), GSPOClip(), CISPOClip(), Reinforce()),
    *(SAPOGate(), DPPOMask(), DPPOMask(divergence="kl"), GMPOClip(), KLCovPenalty()),
]
every_surrogate = pytest.mark.parametrize("loss", SURROGATE_EXAMPLES, ids=repr)


def gradient(loss: object, output: ModelOutput, batch: Batch) -> torch.Tensor:
    leaf = output.logprobs.detach().clone().requires_grad_()
    value, _ = loss(replace(output, logprobs=leaf), batch)  # type: ignore[operator]
    return torch.autograd.grad(value, leaf)[0]


@every_surrogate
def test_on_policy_gradient_is_advantage_times_weight(loss: object) -> None:
    batch, output = fill(random_groups(3), 3)
    batch.old_logprobs = None
    batch.rollout_logprobs = output.logprobs.detach()
    if isinstance(loss, GMPOClip):  # gives each token the mean over its answer
        batch.advantages = batch.per_token(batch.reward + 0.5)
    expected = torch.where(batch.trained, -batch.weight * batch.advantages, 0.0)
    torch.testing.assert_close(gradient(loss, output, batch), expected)
    batch.old_logprobs = output.logprobs.detach()
    torch.testing.assert_close(gradient(loss, output, batch), expected)


def test_the_gradient_of_an_unbiased_kl_has_its_value_in_it_also_on_policy() -> None:
    batch, output = fill(random_groups(3), 3)
    batch.old_logprobs = output.logprobs.detach()
    expected = gradient(KL(unbiased_gradient=True), output, batch)
    batch.old_logprobs = None
    torch.testing.assert_close(gradient(KL(unbiased_gradient=True), output, batch), expected)
    assert not torch.allclose(gradient(KL(), output, batch), expected)


@every_surrogate
@pytest.mark.parametrize("shift", [1e4, -1e4, 30.0, -30.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(loss: object, shift: float, advantage: float) -> None:
    batch, output = fill(random_groups(1), 1)
    batch.advantages = torch.where(batch.trained, advantage, batch.advantages)
    batch.old_logprobs = torch.where(batch.trained, output.logprobs.detach() - shift, batch.old_logprobs)
    batch.rollout_logprobs = batch.old_logprobs + shift
    batch.reference_logprobs = batch.old_logprobs
    correction = TIS() if loss.takes_correction else None  # type: ignore[attr-defined]
    whole = PolicyLoss(surrogate=loss, correction=correction, kl=KL(estimator="k2"))
    for objective in (loss, whole):
        value, metrics = objective(output, batch)
        assert math.isfinite(value.item())
        assert gradient(objective, output, batch).isfinite().all()
        assert all(math.isfinite(x) for x in metrics.result().values())


def test_ratio_beyond_the_bound_is_e_to_the_20_and_has_no_gradient() -> None:
    batch, output = fill(random_groups(1), 1)
    batch.advantages = torch.where(batch.trained, -1.0, 0.0)
    batch.old_logprobs = output.logprobs.detach() - 25.0
    value, metrics = PPOClip()(output, batch)
    assert value.item() == pytest.approx(math.exp(20.0))
    assert metrics.result()["ratio/max"] == pytest.approx(math.exp(20.0))
    assert not gradient(PPOClip(), output, batch).any()


def test_a_trained_token_of_probability_zero_is_not_hidden() -> None:
    batch, output = fill(random_groups(1), 1)
    first = int(batch.trained.nonzero()[0])
    logprobs = output.logprobs.detach().clone()
    logprobs[first] = -math.inf
    batch.old_logprobs = logprobs.clone()
    value, _ = PPOClip()(replace(output, logprobs=logprobs), batch)
    assert math.isnan(value.item())


@pytest.mark.parametrize(
    "loss", [PPOClip(clip_high=0.3), GSPOClip(clip_low=0.1, clip_high=0.2), CISPOClip(clip_high=0.3)], ids=repr
)
def test_policy_metrics_are_those_of_a_loop(loss: object) -> None:
    batch, output = fill(random_groups(0), 0)
    b, now = plain(batch), plain_output(output)
    if isinstance(loss, GSPOClip):
        ratio = {}
        for row in b.rows:
            mean = sum(now.logprobs[t] - b.old_logprobs[t] for t in row.tokens) / max(1, len(row.tokens))
            ratio |= {t: math.exp(mean) for t in row.tokens}
    else:
        ratio = {t: math.exp(now.logprobs[t] - b.old_logprobs[t]) for t in b.trained}
    low = 0.0 if isinstance(loss, CISPOClip) else 1 - loss.clip_low  # type: ignore[attr-defined]
    above = [ratio[t] > 1 + loss.clip_high and (b.advantages[t] > 0 or isinstance(loss, CISPOClip)) for t in b.trained]  # type: ignore[attr-defined]
    below = [ratio[t] < low and b.advantages[t] < 0 for t in b.trained]
    assert any(above)
    assert any(below) or isinstance(loss, CISPOClip)
    assert sum(above) != sum(below)
    n = len(b.trained)
    e = {t: b.reference_logprobs[t] - now.logprobs[t] for t in b.trained}
    metrics = loss(output, batch)[1].result()  # type: ignore[operator]
    assert {k: v for k, v in metrics.items() if k != "loss"} == pytest.approx(
        {
            "ratio/mean": sum(ratio.values()) / n,
            "clip/high": sum(above) / n,
            "clip/low": sum(below) / n,
            "entropy/approximate": -sum(now.logprobs[t] for t in b.trained) / n,
            "entropy": sum(now.entropy[t] for t in b.trained) / n,
            "ratio/min": min(ratio.values()),
            "ratio/max": max(ratio.values()),
            "kl": sum(math.exp(x) - 1 - x for x in e.values()) / n,
        },
        rel=1e-10,
    )


@pytest.mark.parametrize("loss", [GMPOClip(clip_low=0.1, clip_high=0.2), DPPOMask(low=0.02, high=0.03)], ids=repr)
def test_metrics_of_bounds_that_are_not_ratios_are_those_of_a_loop(loss: GMPOClip | DPPOMask) -> None:
    batch, output = fill(random_groups(3, (4, 4, 4)), 3)
    b, lp = plain(batch), plain_output(output).logprobs
    if isinstance(loss, GMPOClip):
        moved = {t: lp[t] - b.old_logprobs[t] for t in b.trained}
        bounds = loss.clip_high, loss.clip_low
    else:
        moved = {t: math.exp(lp[t]) - math.exp(b.rollout_logprobs[t]) for t in b.trained}
        bounds = loss.high, loss.low
    above = sum(moved[t] > bounds[0] and b.advantages[t] > 0 for t in b.trained)
    below = sum(moved[t] < -bounds[1] and b.advantages[t] < 0 for t in b.trained)
    metrics = loss(output, batch)[1].result()
    assert above != below
    assert min(above, below) > 0
    assert metrics["clip/high"] == pytest.approx(above / len(moved))
    assert metrics["clip/low"] == pytest.approx(below / len(moved))


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", [GMPOClip, DPPOMask])
def test_a_token_exactly_at_its_bound_is_not_clipped(
    kind: type[GMPOClip] | type[DPPOMask], sign: float, beyond: bool
) -> None:
    batch, _ = fill(random_groups(1), 1)
    before, now = (0.25, 0.5) if sign > 0 else (0.5, 0.25)
    logprobs, old = (torch.full((len(batch),), p, dtype=torch.float64).log() for p in (now, before))
    batch = replace(batch, old_logprobs=old, rollout_logprobs=old, token_advantages=torch.full_like(old, sign))
    distance = abs(logprobs[0] - old[0] if kind is GMPOClip else logprobs[0].exp() - old[0].exp()).item()
    bound, wide = math.nextafter(distance, 0.0) if beyond else distance, 1.0
    names = ("clip_low", "clip_high") if kind is GMPOClip else ("low", "high")
    settings = dict(zip(names, (wide, bound) if sign > 0 else (bound, wide), strict=True))
    metrics = kind(**settings)(ModelOutput(logprobs), batch)[1].result()
    assert metrics["clip/high"] == float(beyond and sign > 0)
    assert metrics["clip/low"] == float(beyond and sign < 0)


@every_surrogate
@pytest.mark.parametrize("shift", [3.0, -3.0, 0.0])
def test_a_token_without_an_advantage_is_not_clipped_and_trains_nothing(loss: PolicyGradient, shift: float) -> None:
    batch, output = fill(random_groups(1), 1)
    batch.advantages = torch.zeros_like(output.logprobs)
    batch.old_logprobs = batch.rollout_logprobs = output.logprobs.detach() - shift
    metrics = loss(output, batch)[1].result()
    if not isinstance(loss, CISPOClip):  # bounds the ratio without regard to the advantage
        assert (metrics["clip/high"], metrics["clip/low"]) == (0.0, 0.0)
    assert loss.zero_gradient(batch).all() == (not isinstance(loss, KLCovPenalty))
    assert gradient(loss, output, batch).any() == (isinstance(loss, KLCovPenalty) and shift != 0.0)


@pytest.mark.parametrize("loss", [SAPOGate(), KLCovPenalty()], ids=repr)
def test_a_surrogate_without_a_clip_reports_none(loss: SAPOGate | KLCovPenalty) -> None:
    batch, output = fill(random_groups(2), 2)
    metrics = loss(output, batch)[1].result()
    assert (metrics["clip/high"], metrics["clip/low"]) == (0.0, 0.0)


def test_a_token_that_became_certain_is_stopped_by_the_binary_kl() -> None:
    batch, _output = fill(random_groups(1), 1)
    certain, half = torch.zeros(len(batch)).double(), torch.full((len(batch),), 0.5).double().log()
    batch = replace(batch, rollout_logprobs=half, token_advantages=torch.ones(len(batch)).double())
    metrics = DPPOMask(divergence="kl")(ModelOutput(certain), batch)[1].result()
    assert metrics["clip/high"] == 1.0


def test_a_token_that_was_certain_is_stopped_by_the_binary_kl() -> None:
    batch, _output = fill(random_groups(1), 1)
    certain, half = torch.zeros(len(batch)).double(), torch.full((len(batch),), 0.5).double().log()
    batch = replace(batch, rollout_logprobs=certain, token_advantages=-torch.ones(len(batch)).double())
    metrics = DPPOMask(divergence="kl")(ModelOutput(half), batch)[1].result()
    assert metrics["clip/low"] == 1.0


def test_defaults_of_the_bounds() -> None:
    assert SAPOGate() == SAPOGate(tau_positive=1.0, tau_negative=1.05)
    assert DPPOMask() == DPPOMask(divergence="tv", low=0.15, high=0.15, cap=20.0)
    assert GMPOClip() == GMPOClip(clip_low=0.4, clip_high=0.4)
    assert KLCovPenalty() == KLCovPenalty(coefficient=1.0)
    assert DPPOMask(cap=0.5).cap == SAPOGate(tau_negative=0.5).tau_negative == 0.5


def test_a_ratio_to_the_generator_takes_no_correction() -> None:
    with pytest.raises(ValidationError, match="surrogate = dppo already contains the importance ratio"):
        PolicyLoss.model_validate({"surrogate": "dppo", "correction": "tis"})


def test_reinforce_reports_the_ratio_and_never_clips() -> None:
    batch, output = fill(random_groups(2), 2)
    metrics = Reinforce()(output, batch)[1].result()
    ratio = [math.exp(output.logprobs[t].item() - batch.old_logprobs[t].item()) for t in plain(batch).trained]
    assert metrics["ratio/mean"] == pytest.approx(sum(ratio) / len(ratio))
    assert (metrics["clip/high"], metrics["clip/low"]) == (0.0, 0.0)


def clipped(loss: PPOClip | CISPOClip, log_ratio: float, advantage: float) -> tuple[float, float]:
    batch, output = fill(random_groups(1), 1)
    now = torch.full_like(output.logprobs.detach(), -1.0)
    old, advantages = torch.full_like(now, -1.0 - log_ratio), torch.full_like(now, advantage)
    metrics = loss(ModelOutput(now), replace(batch, old_logprobs=old, token_advantages=advantages))[1].result()
    return metrics["clip/high"], metrics["clip/low"]


def test_what_lies_exactly_on_a_bound_or_has_no_advantage_is_not_reported_as_clipped() -> None:
    above, below = torch.tensor([0.25, -0.25], dtype=torch.float64).exp().tolist()
    exact = PPOClip(clip_low=1 - below, clip_high=above - 1)
    assert (1 + exact.clip_high, 1 - exact.clip_low) == (above, below)
    assert clipped(exact, 0.25, 1.0) == clipped(exact, -0.25, -1.0) == (0.0, 0.0)
    assert clipped(exact, 0.26, 1.0) == (1.0, 0.0)
    assert clipped(exact, -0.26, -1.0) == (0.0, 1.0)
    assert clipped(exact, 0.26, 0.0) == clipped(exact, -0.26, 0.0) == (0.0, 0.0)
    assert clipped(CISPOClip(clip_high=above - 1), 0.25, 1.0) == (0.0, 0.0)
    assert clipped(CISPOClip(clip_high=above - 1), 0.26, 1.0) == (1.0, 0.0)


def test_dual_clip_reports_how_often_it_holds() -> None:
    batch, output = fill(random_groups(2), 2, noise=0.8)
    b = plain(batch)
    over = [b.advantages[t] < 0 and math.exp(output.logprobs[t].item() - b.old_logprobs[t]) > 1.5 for t in b.trained]
    assert any(over)
    metrics = PPOClip(dual_clip=1.5)(output, batch)[1].result()
    assert metrics["clip/dual"] == pytest.approx(sum(over) / len(over))
    assert "clip/dual" not in PPOClip()(output, batch)[1].result()


def test_policy_loss_reports_its_terms_and_its_correction() -> None:
    batch, output = fill(random_groups(5), 5)
    loss = PolicyLoss(
        correction=TIS(cap=1.05), kl=KL(coefficient=0.5), entropy_coefficient=0.2, positive_nll=PositiveNLL()
    )
    metrics = loss(output, batch)[1].result()
    b, now = plain(batch), plain_output(output)
    corrected = slow.tis(b, now, 1.05)
    terms = {
        "surrogate": [x * y for x, y in zip(slow.ppo(b, now, now), corrected, strict=True)],
        "kl": slow.kl(b, now, now, 0.5),
        "entropy": [-0.2 * x for x in now.entropy or []],
        "positive_nll": [0.0] * b.length,
    }
    for row in b.rows:
        for t in row.tokens:
            terms["positive_nll"][t] = -0.1 * now.logprobs[t] if row.reward > 0 else 0.0
    for name, values in terms.items():
        assert metrics[f"loss/{name}"] == pytest.approx(sum(b.weight[t] * values[t] for t in b.trained)), name
    assert metrics["loss"] == pytest.approx(sum(metrics[f"loss/{name}"] for name in terms))
    n = len(b.trained)
    changed = [math.exp(b.old_logprobs[t] - b.rollout_logprobs[t]) > 1.05 for t in b.trained]
    assert 0 < sum(changed) < n
    assert metrics["correction/changed"] == pytest.approx(sum(changed) / n)
    assert metrics["correction/weight"] == pytest.approx(sum(corrected[t] for t in b.trained) / n)
    assert "kl" in metrics
    assert not any(name.startswith("correction/") for name in PolicyLoss()(output, batch)[1].result())


@pytest.mark.parametrize("tokens", [2**20, 7])
@pytest.mark.parametrize("seed", range(3))
def test_mismatch_metrics_are_those_of_a_loop(seed: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch.parts, "__defaults__", (tokens,))  # computed in one part, or in several
    batch, output = fill(random_groups(seed), seed)
    metrics = mismatch_metrics(batch).result()
    assert metrics == pytest.approx(slow.mismatch(plain(batch), plain_output(output)), rel=1e-10)


@pytest.mark.parametrize("column", ["old_logprobs", "rollout_logprobs"])
def test_without_the_log_probs_of_both_no_mismatch_is_measured(column: str) -> None:
    batch, _ = fill(random_groups(1), 1)
    assert not mismatch_metrics(replace(batch, **{column: None})).result()


def test_mismatch_is_perfect_when_sampler_and_learner_agree() -> None:
    batch, _ = fill(random_groups(1), 1)
    metrics = mismatch_metrics(replace(batch, rollout_logprobs=batch.old_logprobs)).result()
    assert metrics["mismatch/token_mult_prob_error"] == 1.0
    assert (metrics["mismatch/kl"], metrics["mismatch/max"], metrics["mismatch/sequence_max"]) == (0.0, 0.0, 1.0)


def test_a_token_that_the_learner_finds_impossible_shows_as_an_infinite_mismatch() -> None:
    batch, _ = fill(random_groups(1), 1)
    old = batch.old_logprobs.clone()
    old[batch.trained.nonzero()[0]] = -math.inf
    metrics = mismatch_metrics(replace(batch, old_logprobs=old)).result()
    assert metrics["mismatch/max"] == math.inf
    assert metrics["mismatch/token_mult_prob_error"] > 1e6


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TIS(), [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]),
        (IcePop(), [0.0, 0.5, 1.0, 2.0, 5.0, 0.0]),
        (IcePop(low=0.0, high=8.0), [0.25, 0.5, 1.0, 2.0, 5.0, 8.0]),
    ],
    ids=repr,
)
def test_corrections_at_their_bounds(correction: TIS | IcePop, expected: list[float]) -> None:
    batch, _ = fill(random_groups(0), 0)
    difference = torch.tensor([0.25, 0.5 + 1e-9, 1.0, 2.0, 5.0 - 1e-9, 8.0 - 1e-9], dtype=torch.float64).log()
    assert correction(difference, batch).tolist() == pytest.approx(expected)


def test_icepop_keeps_what_lies_exactly_on_its_bounds() -> None:
    batch, _ = fill(random_groups(0), 0)
    on_policy = torch.zeros(3).double()
    assert IcePop(low=1.0)(on_policy, batch).tolist() == [1.0] * 3
    assert IcePop(high=1.0)(on_policy, batch).tolist() == [1.0] * 3
    assert IcePop(low=1.0)(on_policy - 0.1, batch).tolist() == IcePop(high=1.0)(on_policy + 0.1, batch).tolist()
    assert not IcePop(low=1.0)(on_policy - 0.1, batch).any()


def test_sequence_mask_keeps_what_lies_exactly_on_its_bounds() -> None:
    batch, _ = fill(random_groups(0), 0)
    ones = torch.zeros(len(batch)).double()
    kept = batch.trained.double()
    torch.testing.assert_close(SequenceMask(low=1.0, high=1.0)(ones, batch) * kept, kept)
    assert not (SequenceMask(low=1.0, high=9.0)(ones - 0.1 * kept, batch)).any()
    assert not (SequenceMask(low=0.0, high=1.0)(ones + 0.1 * kept, batch)).any()


def test_the_correction_multiplies_the_surrogate_only_and_has_no_gradient() -> None:
    batch, output = fill(random_groups(4), 4)
    batch.old_logprobs = None
    kl_alone = gradient(KL(coefficient=0.5), output, batch)
    plain_surrogate = gradient(Reinforce(), output, batch)
    both = gradient(PolicyLoss(surrogate=Reinforce(), correction=TIS(), kl=KL(coefficient=0.5)), output, batch)
    weight = torch.where(batch.trained, (output.logprobs.detach() - batch.rollout_logprobs).exp().clamp(max=2.0), 0.0)
    torch.testing.assert_close(both, plain_surrogate * weight + kl_alone)


def test_a_bare_number_for_a_kl_term_is_its_coefficient(tmp_path: Path) -> None:
    (tmp_path / "loss.yaml").write_text("kl: 0.02\n")
    assert load(PolicyLoss, tmp_path / "loss.yaml").value.kl == KL(coefficient=0.02)


def test_needs_follow_from_the_terms_that_are_set() -> None:
    assert PolicyLoss().reads == {"advantages"}
    assert PolicyLoss(correction=TIS()).reads == {"advantages", "rollout_logprobs"}
    assert PolicyLoss(kl=KL(coefficient=0)).reads == {"advantages", "reference_logprobs"}
    assert PolicyLoss(entropy_coefficient=0.1).reads == {"advantages"}
    assert PolicyLoss(entropy_coefficient=0.1).outputs == {"logprobs", "entropy"}
    assert PolicyLoss().outputs == KL().outputs == {"logprobs"}
    assert PolicyLoss(positive_nll=PositiveNLL()).reads == {"advantages"}
    assert KL().reads == {"reference_logprobs"}


def test_a_sequence_objective_is_not_cut_inside_a_sequence() -> None:
    assert (PolicyLoss().unit, PolicyLoss(surrogate=GSPOClip()).unit) == ("token", "sequence")
    assert PolicyLoss(surrogate=GMPOClip()).unit == "sequence"
    assert (PolicyLoss(correction=TIS()).unit, PolicyLoss(correction=SequenceMask()).unit) == ("token", "sequence")
    assert PolicyLoss(correction=IcePop()).unit == TIS().unit == IcePop().unit == "token"


def test_defaults_are_those_of_the_papers() -> None:
    assert (PPOClip().clip_low, PPOClip().clip_high, PPOClip().dual_clip) == (0.2, 0.2, None)
    assert (GSPOClip().clip_low, GSPOClip().clip_high) == (3e-4, 4e-4)
    assert CISPOClip().clip_high == 4.0
    assert (KL().coefficient, KL().estimator, KL().log_ratio_clamp, KL().output_clamp) == (0.01, "k3", 20.0, 10.0)
    assert not KL().unbiased_gradient
    assert (TIS().cap, IcePop().low, IcePop().high) == (2.0, 0.5, 5.0)
    assert (SequenceMask().low, SequenceMask().high) == (0.98, 1.02)
    assert PolicyLoss() == PolicyLoss(surrogate=PPOClip(), correction=None, kl=None, entropy_coefficient=0.0)
    assert (PositiveNLL().coefficient, PositiveNLL().threshold) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PPOClip, {"clip_low": 0.0}),
        (PPOClip, {"clip_high": 0.0}),
        (PPOClip, {"dual_clip": 1.0}),
        (PPOClip, {"clip_higher": 0.3}),
        (GSPOClip, {"clip_low": 0.0}),
        (GSPOClip, {"clip_high": 0.0}),
        (CISPOClip, {"clip_high": 0.0}),
        (SAPOGate, {"tau_positive": 0.0}),
        (SAPOGate, {"tau_negative": 0.0}),
        (DPPOMask, {"low": 0.0}),
        (DPPOMask, {"high": 0.0}),
        (DPPOMask, {"cap": 0.0}),
        (DPPOMask, {"divergence": "js"}),
        (GMPOClip, {"clip_low": 0.0}),
        (GMPOClip, {"clip_high": 0.0}),
        (KLCovPenalty, {"coefficient": -0.1}),
        (TIS, {"cap": 0.0}),
        (IcePop, {"low": -0.1}),
        (IcePop, {"low": 1.1}),
        (IcePop, {"high": 0.9}),
        (SequenceMask, {"low": -0.1}),
        (SequenceMask, {"low": 1.1}),
        (SequenceMask, {"high": 0.9}),
        (KL, {"coefficient": -0.1}),
        (KL, {"log_ratio_clamp": 0.0}),
        (KL, {"output_clamp": 0.0}),
        (KL, {"estimator": "k4"}),
        (PolicyLoss, {"entropy_coefficient": -0.1}),
        (PositiveNLL, {"coefficient": -0.1}),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        kind(**settings)


def test_settings_at_the_edge_of_their_range_are_allowed() -> None:
    assert IcePop(low=0.0).low == SequenceMask(low=0.0).low == 0.0
    assert PolicyLoss(entropy_coefficient=0.0).entropy_coefficient == PositiveNLL(coefficient=0.0).coefficient == 0.0
    assert PPOClip(clip_low=0.5, clip_high=0.5, dual_clip=1.1).dual_clip == 1.1
    assert GSPOClip(clip_low=0.5, clip_high=0.5).clip_low == CISPOClip(clip_high=0.5).clip_high == 0.5
    assert TIS(cap=0.5).cap == 0.5
    assert KL(log_ratio_clamp=0.5, output_clamp=0.5, coefficient=0.0).log_ratio_clamp == 0.5


def test_registered_names_lead_to_their_classes() -> None:
    def class_names(registry: dict[str, str]) -> dict[str, str]:
        return {name: Component(registry).resolve(name)[0].__name__ for name in registry}

    assert class_names(SURROGATES) == {
        "ppo_clip": "PPOClip",
        "gspo": "GSPOClip",
        "cispo": "CISPOClip",
        "reinforce": "Reinforce",
        "sapo": "SAPOGate",
        "dppo": "DPPOMask",
        "gmpo": "GMPOClip",
        "kl_cov": "KLCovPenalty",
    }
    assert class_names(CORRECTIONS) == {"tis": "TIS", "icepop": "IcePop", "sequence_mask": "SequenceMask"}
    assert class_names(FORMS) == {"sigmoid": "Sigmoid", "robust": "Robust", "hinge": "Hinge", "ipo": "IPO"}
    assert class_names(DIVERGENCES) == {"forward": "Forward", "reverse": "Reverse", "mixed": "Mixed", "jsd": "JSD"}
    assert class_names(LOSSES) == {
        "policy": "PolicyLoss",
        "value": "ValueLoss",
        "sft": "SFTLoss",
        "dpo": "DPOLoss",
        "simpo": "SimPOLoss",
        "orpo": "ORPOLoss",
        "kto": "KTOLoss",
        "bradley_terry": "BradleyTerry",
        "score_regression": "ScoreRegression",
        "implicit_reward": "ImplicitReward",
        "distillation": "DistillationLoss",
        "on_policy_distillation": "OnPolicyDistillationLoss",
    }
