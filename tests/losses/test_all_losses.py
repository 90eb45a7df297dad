"""Properties of every loss: it equals its oracle, and it is additive."""

import math
import pickle
import random
from dataclasses import replace

import pytest
import torch

from tests.losses.batches import part, without
from tests.losses.cases import CASES, Case
from tests.reference.plain import PlainOutput, plain, plain_output
from whet.base.errors import DataError
from whet.core.batch import Batch, ModelOutput
from whet.core.packing import idle_micro_batches, pack

every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SEEDS = (0, 1, 2)


def weighted(case: Case, batch: Batch, now: PlainOutput, frozen: PlainOutput) -> float:
    b = plain(batch)
    values = case.oracle(b, now, frozen)
    return math.fsum(b.weight[t] * values[t] for t in b.trained)


@every_loss
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_is_what_the_oracle_says(case: Case, seed: int) -> None:
    batch, output = case.make(seed)
    loss, metrics = case.loss(output, batch)
    expected = weighted(case, batch, plain_output(output), plain_output(output))
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert batch.weight is not None
    assert metrics.result()["loss"] == pytest.approx(expected / batch.weight.sum().item(), rel=1e-10, abs=1e-10)


@every_loss
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_gradient_is_the_finite_difference_of_the_oracle_and_none_reaches_untrained_tokens(
    case: Case, seed: int
) -> None:
    batch, output = case.make(seed)
    loss, _ = case.loss(output, batch)
    loss.backward()
    now, moved, h = plain_output(output), plain_output(output), 1e-6
    for name in ("logprobs", "entropy", "values", "topk"):
        leaf, column = getattr(output, name), getattr(moved, name)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert (gradient[~batch.trained] == 0).all()
        if name != "logprobs" and name not in case.loss.outputs:
            assert not gradient.any()
            continue
        for t in batch.trained.nonzero().squeeze(1).tolist():
            for k in range(gradient[t].numel()):
                place, key = (column[t], k) if gradient.ndim == 2 else (column, t)
                before, sides = place[key], []
                for step in (h, -h):
                    place[key] = before + step
                    sides.append(weighted(case, batch, moved, now))
                place[key] = before
                expected = (sides[0] - sides[1]) / (2 * h)
                assert gradient[t].reshape(-1)[k].item() == pytest.approx(expected, rel=1e-5, abs=1e-7), (name, t)


@every_loss
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_metrics_of_a_batch_are_those_of_its_parts_together(case: Case, seed: int) -> None:
    batch, output = case.make(seed)
    whole, metrics = case.loss(output, batch)
    (gradient,) = torch.autograd.grad(whole, output.logprobs, allow_unused=True)

    random.seed(seed)
    owner = {group: random.randrange(3) for group in range(len(batch.group_uids))}
    by_row = [random.randrange(3) if case.loss.unit != "group" else owner[group] for group in batch.group.tolist()]
    total, gradients, merged = 0.0, torch.zeros_like(output.logprobs), None
    for index in range(3):
        rows = torch.tensor([row for row, where in enumerate(by_row) if where == index], dtype=torch.long)
        if not rows.numel():
            continue
        piece, tokens = batch.select(rows)
        said_of_piece = part(output, tokens)
        loss, piece_metrics = case.loss(said_of_piece, piece)
        total += loss.item()
        merged = piece_metrics if merged is None else merged.merge(piece_metrics)
        if gradient is not None:
            gradients += torch.autograd.grad(loss, output.logprobs, allow_unused=True, materialize_grads=True)[0]
    assert total == pytest.approx(whole.item(), rel=1e-10, abs=1e-12)
    assert merged is not None
    assert merged.result() == pytest.approx(metrics.result(), rel=1e-9, abs=1e-12)
    if gradient is not None:
        torch.testing.assert_close(gradients, gradient, rtol=1e-10, atol=1e-12)


@every_loss
def test_a_batch_of_nothing_costs_nothing(case: Case) -> None:
    batch, output = case.make(0)
    nothing, tokens = batch.select(torch.tensor([], dtype=torch.long))
    loss, metrics = case.loss(part(output, tokens), nothing)
    assert (loss.item(), metrics.result()) == (0.0, {})


@every_loss
def test_rows_without_a_trained_token_cost_nothing(case: Case) -> None:
    batch, output = case.make(0)
    untrained = replace(batch, trained=torch.zeros_like(batch.trained))
    loss, metrics = case.loss(output, untrained)
    assert (loss.item(), metrics.result()) == (0.0, {})


@every_loss
def test_a_rank_without_work_costs_nothing(case: Case) -> None:
    batch, output = case.make(0)
    shards = pack(batch, 16, 1000, case.loss.unit)
    for micro in (*shards[-1], *idle_micro_batches(batch, 1, case.loss.unit)[0]):
        loss, metrics = case.loss(part(output, micro.tokens), micro.batch)
        assert (loss.item(), metrics.result()) == (0.0, {})


@every_loss
def test_a_loss_is_a_value_that_can_be_printed_pickled_and_compared(case: Case) -> None:
    assert pickle.loads(pickle.dumps(case.loss)) == case.loss
    assert type(case.loss).__name__ in repr(case.loss)


@every_loss
def test_what_a_loss_needs_and_does_not_get_is_named(case: Case) -> None:
    batch, output = case.make(0)
    for name in sorted(case.loss.reads - {"topk_ids"}):  # those are what the model's topk is of
        with pytest.raises(DataError, match=f"'{name}'"):
            case.loss(output, without(batch, name))
    with pytest.raises(DataError, match="'weight'"):
        case.loss(output, without(batch, "share"))
    for name in sorted(case.loss.outputs - {"logprobs"}):
        with pytest.raises(DataError, match=f"'{name}'"):
            case.loss(replace(output, **{name: None}), batch)


@every_loss
def test_what_a_loss_does_not_need_may_be_missing(case: Case) -> None:
    batch, output = case.make(0)
    less = without(batch, *(batch.filled - case.loss.reads - {"share", "weight", "old_logprobs"}))
    mute = replace(output, **dict.fromkeys({"entropy", "values", "topk"} - case.loss.outputs))
    assert case.loss(mute, less)[0].item() == pytest.approx(case.loss(output, batch)[0].item(), rel=1e-12)


@every_loss
def test_float32_gives_the_same_within_its_precision(case: Case) -> None:
    batch, output = case.make(0)
    single = ModelOutput(
        *(column.detach().float() for column in (output.logprobs, output.entropy, output.values, output.topk))
    )
    assert case.loss(single, batch)[0].item() == pytest.approx(case.loss(output, batch)[0].item(), rel=2e-4, abs=2e-5)
