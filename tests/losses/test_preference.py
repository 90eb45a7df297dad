"""Preference, reward-model and value losses, their metrics and their errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.groups import episode
from tests.losses.batches import fill, pair_groups, random_groups, unpaired_groups
from tests.reference import preference as slow
from tests.reference.plain import plain, plain_output
from whet.base.errors import DataError
from whet.config import SettingsError
from whet.core.batch import Batch, ModelOutput
from whet.core.types import Episode, Group, Span, Status, Task
from whet.losses.dpo_forms import IPO, Hinge, Robust, Sigmoid
from whet.losses.preference import DPOLoss, KTOLoss, ORPOLoss, Pairs, SimPOLoss
from whet.losses.reward_model import BradleyTerry, ScoreRegression, sequence_scores
from whet.losses.value import ValueLoss, explained_variance

PAIR_LOSSES = [
    DPOLoss(),
    DPOLoss(form=IPO()),
    DPOLoss(form=Hinge()),
    DPOLoss(form=Robust(label_smoothing=0.1)),
    SimPOLoss(),
    ORPOLoss(),
    BradleyTerry(),
]
every_pair_loss = pytest.mark.parametrize("loss", PAIR_LOSSES, ids=repr)


def pairs(seed: int = 0) -> tuple[Batch, ModelOutput]:
    return fill(pair_groups(seed), seed, "group")


def rows(seed: int = 0) -> tuple[Batch, ModelOutput]:
    return fill(unpaired_groups(seed), seed, "sequence")


@every_pair_loss
def test_a_pair_weighs_one_over_the_number_of_pairs(loss: Any) -> None:
    batch, output = pairs()
    assert batch.share is not None
    each = [loss(output, replace(batch, share=batch.share * (batch.group == g)))[0] for g in range(4)]
    alone = []
    for g in range(4):
        piece, tokens = batch.select((batch.group == g).nonzero().squeeze(1))
        piece = Batch.weigh(piece, "group")
        alone.append(loss(replace(output, logprobs=output.logprobs[tokens], values=output.values[tokens]), piece)[0])
    assert [x.item() * 4 for x in each] == pytest.approx([x.item() for x in alone])


@every_pair_loss
def test_the_order_within_a_pair_does_not_matter(loss: Any) -> None:
    batch, output = pairs()
    swapped = replace(batch, reward=1 - batch.reward)
    assert loss(output, batch)[0].item() != pytest.approx(loss(output, swapped)[0].item())
    twice = replace(swapped, reward=1 - swapped.reward)
    assert loss(output, twice)[0].item() == loss(output, batch)[0].item()


@every_pair_loss
def test_only_which_reward_is_higher_counts(loss: Any) -> None:
    batch, output = pairs()
    assert loss(output, replace(batch, reward=batch.reward * 7 - 3))[0].item() == loss(output, batch)[0].item()


@every_pair_loss
@pytest.mark.parametrize("bad", ["three", "one", "tie", "nan"])
def test_a_group_that_is_no_pair_is_named(loss: Any, bad: str) -> None:
    groups = pair_groups(0)
    extra = episode([Span([1], False), Span([2], True)], 0.5)
    if bad == "three":
        groups[2].episodes.append(extra)
    elif bad == "one":
        groups[2].episodes.pop()
    else:
        for row in groups[2].episodes:
            row.reward = 0.5 if bad == "tie" else math.nan
    batch, output = fill(groups, 0, "group")
    with pytest.raises(DataError, match=r"'pair-2' is not a preference pair"):
        loss(output, batch)


@every_pair_loss
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_pairs_leave_loss_and_gradient_finite(loss: Any, gap: float) -> None:
    batch, output = pairs()
    shift = torch.where(batch.per_token(batch.reward) > 0, gap, -gap).double()
    logprobs = torch.where(batch.trained, torch.minimum(shift, torch.zeros(())) - 0.1, math.nan).requires_grad_()
    values = torch.where(batch.trained, shift, math.nan).requires_grad_()
    value, metrics = loss(replace(output, logprobs=logprobs, values=values), batch)
    value.backward()
    assert math.isfinite(value.item())
    for leaf in (logprobs, values):
        assert leaf.grad is None or leaf.grad.isfinite().all()
    assert all(math.isfinite(x) for x in metrics.result().values())


def test_a_certain_answer_has_finite_odds() -> None:
    batch, output = pairs()
    logprobs = torch.zeros_like(output.logprobs).requires_grad_()
    value, _ = ORPOLoss()(replace(output, logprobs=logprobs), batch)
    value.backward()
    assert value.item() == pytest.approx(0.1 * math.log(2))
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    "loss", [DPOLoss(beta=0.3), DPOLoss(beta=0.3, length_average=True), DPOLoss(form=IPO(), beta=0.3)], ids=repr
)
def test_dpo_reports_accuracy_margin_and_implicit_rewards_with_beta(loss: DPOLoss) -> None:
    batch, output = pairs(3)
    b, now = plain(batch), plain_output(output)
    measure = slow.total if not loss.length_average and loss.form == Sigmoid() else slow.mean
    chosen, rejected = [], []
    for first, second in b.groups():
        c, r = (first, second) if first.reward > second.reward else (second, first)
        chosen.append(0.3 * (measure(now.logprobs, c) - measure(b.reference_logprobs, c)))
        rejected.append(0.3 * (measure(now.logprobs, r) - measure(b.reference_logprobs, r)))
    check_pair_metrics(loss(output, batch)[1].result(), chosen, rejected)


def test_simpo_orpo_and_bradley_terry_report_the_same_four_numbers() -> None:
    batch, output = pairs(3)
    b, now = plain(batch), plain_output(output)
    couples = [(f, s) if f.reward > s.reward else (s, f) for f, s in b.groups()]
    chosen, rejected = ([slow.mean(now.logprobs, couple[i]) for couple in couples] for i in (0, 1))
    check_pair_metrics(SimPOLoss()(output, batch)[1].result(), [2 * x for x in chosen], [2 * x for x in rejected])
    check_pair_metrics(ORPOLoss()(output, batch)[1].result(), [0.1 * x for x in chosen], [0.1 * x for x in rejected])
    scores = [[slow.score(now, couple[i]) for couple in couples] for i in (0, 1)]
    check_pair_metrics(BradleyTerry()(output, batch)[1].result(), *scores)


def check_pair_metrics(metrics: dict[str, float], chosen: list[float], rejected: list[float]) -> None:
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert 0 < sum(m > 0 for m in margins) < len(margins)
    assert {k: v for k, v in metrics.items() if k != "loss"} == pytest.approx(
        {
            "preference/accuracy": sum(m > 0 for m in margins) / len(margins),
            "preference/margin": sum(margins) / len(margins),
            "preference/chosen_reward": sum(chosen) / len(chosen),
            "preference/rejected_reward": sum(rejected) / len(rejected),
        }
    )


def test_a_tie_is_half_a_success() -> None:
    """A model without a preference, as DPO's before its first step, has accuracy 0.5; else any change looks like
    progress."""
    batch, output = pairs()
    equal = replace(output, logprobs=batch.reference_logprobs)
    metrics = DPOLoss()(equal, batch)[1].result()
    assert (metrics["preference/accuracy"], metrics["preference/margin"]) == (0.5, 0.0)
    assert DPOLoss()(equal, batch)[0].item() == pytest.approx(math.log(2))


def test_a_pair_that_trains_nothing_is_not_counted() -> None:
    groups = pair_groups(0)
    for row in groups[0].episodes:
        for span in row.spans:
            span.trained = False
    batch, output = fill(groups, 0, "group")
    rest, tokens = batch.select((batch.group > 0).nonzero().squeeze(1))
    said_of_rest = replace(output, logprobs=output.logprobs[tokens])
    (loss, metrics), (expected, others) = DPOLoss()(output, batch), DPOLoss()(said_of_rest, rest)
    assert loss.item() == pytest.approx(expected.item())
    assert metrics.result() == pytest.approx(others.result())


def test_robust_without_smoothing_is_plain_dpo() -> None:
    batch, output = pairs()
    assert DPOLoss(form=Robust())(output, batch)[0].item() == pytest.approx(DPOLoss()(output, batch)[0].item())


@pytest.mark.parametrize("bad", [math.nan, 0.5, 2.0, -1.0])
def test_kto_takes_rewards_of_one_and_zero_only(bad: float) -> None:
    batch, output = rows()
    batch.reward[3] = bad
    with pytest.raises(DataError, match="'row-3'"):
        KTOLoss()(output, batch)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_rows_leave_kto_finite(gap: float) -> None:
    batch, output = rows()
    logprobs = torch.where(batch.trained, gap, math.nan).double().requires_grad_()
    value, _ = KTOLoss()(replace(output, logprobs=logprobs), batch)
    value.backward()
    assert math.isfinite(value.item())
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_kto_reports_the_implicit_rewards_of_trained_rows() -> None:
    batch, output = rows(6)
    b, now = plain(batch), plain_output(output)
    assert {0, 1} <= {len(row.tokens) for row in b.rows}
    for name, reward in (("desirable", 1.0), ("undesirable", 0.0)):
        gains = [
            0.2 * (slow.total(now.logprobs, row) - slow.total(b.reference_logprobs, row))
            for row in b.rows
            if row.reward == reward and row.tokens
        ]
        metrics = KTOLoss(beta=0.2)(output, batch)[1].result()
        assert metrics[f"preference/{name}_reward"] == pytest.approx(sum(gains) / len(gains))


def test_kto_is_right_where_the_implicit_reward_has_the_sign_of_the_label() -> None:
    shares = []
    for seed in range(6):
        batch, output = rows(seed)
        b, now = plain(batch), plain_output(output)
        right = []
        for row in b.rows:
            gain = slow.total(now.logprobs, row) - slow.total(b.reference_logprobs, row)
            if row.tokens:
                right.append(gain > 0 if row.reward == 1 else gain < 0)
        shares.append(sum(right) / len(right))
        assert KTOLoss()(output, batch)[1].result()["preference/accuracy"] == pytest.approx(shares[-1])
        equal = replace(output, logprobs=batch.reference_logprobs)
        assert KTOLoss()(equal, batch)[1].result()["preference/accuracy"] == 0.5, "a reward of 0 has no sign"
    assert any(0 < share < 1 for share in shares)


@pytest.mark.parametrize(("lacking", "problem"), [("all", "is not a score of"), ("one", "must be a finite score")])
def test_a_margin_that_is_missing_is_named(lacking: str, problem: str) -> None:
    batch, output = pairs()
    if lacking == "all":
        del batch.scores["correct"]
    else:
        batch.scores["correct"][1] = math.nan
    with pytest.raises(DataError, match=f"loss.margin = 'correct' {problem}"):
        BradleyTerry(margin="correct")(output, batch)


def test_the_score_of_a_sequence_is_the_value_at_its_last_trained_token() -> None:
    turns = [Span([1], False), Span([2, 3], True), Span([4], False), Span([5, 6], True), Span([7], False)]
    batch = Batch.from_groups([Group("g", Task("g", []), [episode(turns, 2.0)])]).weigh("sequence")
    values = torch.arange(len(batch)).double()
    loss, metrics = ScoreRegression()(ModelOutput(torch.zeros(len(batch)), values=values), batch)
    assert loss.item() == (5.0 - 2.0) ** 2
    assert metrics.result() == {"loss": 9.0, "score/mean": 5.0, "score/absolute_error": 3.0}


def test_score_regression_reports_trained_sequences_only() -> None:
    batch, output = fill(random_groups(0), 0, "sequence")
    b, now = plain(batch), plain_output(output)
    trained = [row for row in b.rows if row.tokens]
    assert len(trained) < len(b.rows)
    metrics = ScoreRegression()(output, batch)[1].result()
    scores = [slow.score(now, row) for row in trained]
    assert metrics["score/mean"] == pytest.approx(sum(scores) / len(scores))
    errors = [abs(slow.score(now, row) - row.reward) for row in trained]
    assert metrics["score/absolute_error"] == pytest.approx(sum(errors) / len(errors))


def test_value_loss_reports_what_a_loop_finds() -> None:
    batch, output = fill(random_groups(1), 1)
    b, now = plain(batch), plain_output(output)
    assert now.values is not None
    errors = {t: (now.values[t] - b.returns[t]) ** 2 for t in b.trained}
    worst = slow.value(b, now, now, clip=0.8)
    n = len(errors)
    clipped = [2 * worst[t] > errors[t] * (1 + 1e-9) for t in b.trained]
    assert 0 < sum(clipped) < n
    metrics = ValueLoss(clip=0.8)(output, batch)[1].result()
    assert metrics["value/mean"] == pytest.approx(sum(now.values[t] for t in b.trained) / n)
    assert metrics["value/return"] == pytest.approx(sum(b.returns[t] for t in b.trained) / n)
    assert metrics["value/squared_error"] == pytest.approx(sum(errors.values()) / n)
    assert metrics["value/clipped"] == pytest.approx(sum(clipped) / n)
    assert "value/clipped" not in ValueLoss(clip=None)(output, batch)[1].result()


def test_the_clip_wants_the_values_of_the_start_of_the_step() -> None:
    batch, output = fill(random_groups(1), 1)
    with pytest.raises(DataError, match="'values'"):
        ValueLoss()(output, replace(batch, values=None))


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    batch, _ = fill(random_groups(1), 1)
    assert batch.returns is not None
    assert batch.values is not None

    def of(values: torch.Tensor, returns: torch.Tensor = batch.returns) -> dict[str, float]:
        return explained_variance(values, returns, batch).result()

    assert of(batch.returns) == {"value/explained_variance": 1.0}
    assert of(batch.returns + 3.0)["value/explained_variance"] == pytest.approx(1.0)
    assert of(torch.zeros(len(batch)))["value/explained_variance"] == pytest.approx(0.0)
    assert of(batch.values, torch.ones(len(batch))) == {}
    b = plain(batch)
    errors = [b.returns[t] - b.values[t] for t in b.trained]
    returns = [b.returns[t] for t in b.trained]

    def variance(xs: list[float]) -> float:
        return sum((x - sum(xs) / len(xs)) ** 2 for x in xs)

    assert of(batch.values)["value/explained_variance"] == pytest.approx(1 - variance(errors) / variance(returns))
    one = replace(batch, trained=torch.zeros_like(batch.trained).index_fill(0, batch.trained.nonzero()[0], True))
    assert explained_variance(batch.values, batch.returns, one).result() == {}


def test_explained_variance_of_two_tokens_is_known() -> None:
    batch, _ = fill(random_groups(1), 1)
    two = replace(batch, trained=torch.zeros_like(batch.trained).index_fill(0, batch.trained.nonzero()[:2, 0], True))
    assert explained_variance(batch.returns, batch.returns, two).result() == {"value/explained_variance": 1.0}


def test_what_each_loss_needs_and_how_it_may_be_cut() -> None:
    assert DPOLoss().reads == {"reference_logprobs"}
    assert KTOLoss().reads == {"reference_logprobs", "reference_point"}
    assert SimPOLoss().reads == ORPOLoss().reads == frozenset()
    assert BradleyTerry().reads == ScoreRegression().reads == frozenset()
    assert BradleyTerry().outputs == ScoreRegression().outputs == ValueLoss().outputs == {"values"}
    assert ValueLoss().reads == {"values", "returns"}
    assert ValueLoss(clip=None).reads == {"returns"}
    assert {loss.unit for loss in PAIR_LOSSES} == {"group"}
    assert KTOLoss().unit == ScoreRegression().unit == "sequence"
    assert ValueLoss().unit == "token"


def test_defaults_are_those_of_the_papers() -> None:
    assert DPOLoss() == DPOLoss(beta=0.1, form=Sigmoid(label_smoothing=0.0), length_average=False, sft_weight=0.0)
    assert SimPOLoss() == SimPOLoss(beta=2.0, gamma=0.5)
    assert ORPOLoss() == ORPOLoss(weight=0.1)
    assert KTOLoss() == KTOLoss(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    assert BradleyTerry() == BradleyTerry(margin=None, centre_coefficient=0.0)
    assert ValueLoss() == ValueLoss(clip=0.2)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DPOLoss, {"beta": 0.0}),
        (Sigmoid, {"label_smoothing": 0.5}),
        (Sigmoid, {"label_smoothing": -0.1}),
        (Robust, {"label_smoothing": 0.5}),
        (Robust, {"label_smoothing": -0.1}),
        (DPOLoss, {"label_smoothing": 0.1}),
        (DPOLoss, {"sft_weight": -0.1}),
        (DPOLoss, {"form": "rpo"}),
        (SimPOLoss, {"beta": 0.0}),
        (SimPOLoss, {"gamma": -0.1}),
        (ORPOLoss, {"weight": -0.1}),
        (KTOLoss, {"beta": 0.0}),
        (KTOLoss, {"desirable_weight": -0.1}),
        (KTOLoss, {"undesirable_weight": -0.1}),
        (BradleyTerry, {"centre_coefficient": -0.1}),
        (ValueLoss, {"clip": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        kind(**settings)


def test_settings_at_the_edge_of_their_range_are_allowed() -> None:
    assert DPOLoss(beta=0.01, sft_weight=0.0).beta == 0.01
    assert Sigmoid(label_smoothing=0.49).label_smoothing == Robust(label_smoothing=0.49).label_smoothing == 0.49
    assert SimPOLoss(beta=0.5, gamma=0.0).gamma == ORPOLoss(weight=0.0).weight == 0.0
    assert KTOLoss(beta=0.01, desirable_weight=0.0, undesirable_weight=0.0).desirable_weight == 0.0
    assert BradleyTerry(centre_coefficient=0.0).centre_coefficient == 0.0
    assert ValueLoss(clip=0.5).clip == 0.5


def test_the_score_of_an_episode_that_was_cut_before_its_first_reply_is_zero() -> None:
    groups = pair_groups(0)
    groups[0].episodes[1] = Episode([], status=Status.TRUNCATED)
    batch = Batch.from_groups(groups)
    output = ModelOutput(torch.zeros(len(batch)), values=torch.arange(1.0, len(batch) + 1))
    silent = batch.trained_per_sequence == 0
    assert silent.any()
    assert torch.equal(sequence_scores(output, batch) == 0, silent)


def test_an_answer_of_several_branches_is_refused_by_name() -> None:
    groups = pair_groups(0)
    groups[1].episodes[0].branches *= 2
    with pytest.raises(DataError, match=r"'pair-1' has an episode of several branches"):
        Pairs.of(Batch.from_groups(groups))
