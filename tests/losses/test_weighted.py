"""Helpers shared by all losses."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.losses.batches import fill, random_groups
from tests.reference.plain import plain
from whet.base.errors import DataError
from whet.core.batch import Batch, ModelOutput
from whet.losses.tensors import bounded_exp, log1mexp, mean_per_sequence
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


def test_metrics_of_columns_see_trained_tokens_only_and_keep_float64() -> None:
    batch, _ = fill(random_groups(0), 0)
    trained = batch.trained.nonzero().squeeze(1)
    one = torch.full((len(batch),), math.nan)
    one[trained] = 1.0
    one[trained[0]] = 2.0**24  # in float32, adding 1 to this changes nothing
    ramp = torch.where(batch.trained, torch.arange(len(batch)) - 5.0, math.nan).requires_grad_()
    metrics = token_metrics(batch, {"big": one, "flag": batch.trained}, {"ramp": ramp, "one": one}).result()
    count = trained.numel()
    assert metrics == {
        "big": (2.0**24 + count - 1) / count,
        "flag": 1.0,
        "ramp/min": trained[0].item() - 5.0,
        "ramp/max": trained[-1].item() - 5.0,
        "one/min": 1.0,
        "one/max": 2.0**24,
    }


def test_means_of_sequences_are_zero_where_nothing_is_trained() -> None:
    batch, output = fill(random_groups(0), 0)
    means = mean_per_sequence(batch, at_trained(batch, output.logprobs)).tolist()
    for row, mean in zip(plain(batch).rows, means, strict=True):
        expected = sum(output.logprobs[t].item() for t in row.tokens) / len(row.tokens) if row.tokens else 0.0
        assert mean == pytest.approx(expected)


def test_exponent_is_bounded_on_both_sides() -> None:
    values = bounded_exp(torch.tensor([-1e4, -20.5, 0.0, 20.5, 1e4]).double()).tolist()
    assert values == pytest.approx([math.exp(-20), math.exp(-20), 1.0, math.exp(20), math.exp(20)], rel=1e-12)


def test_log_of_one_minus_exp_is_accurate_near_zero() -> None:
    assert log1mexp(torch.tensor([-1e-12, -1.0, -50.0]).double()).tolist() == pytest.approx(
        [math.log(1e-12), math.log(1 - math.exp(-1)), -math.exp(-50)], rel=1e-9, abs=1e-15
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda values: None, "not a NoneType"),
        (lambda values: values, "not a Tensor"),
        (lambda values: (values.tolist(), Metrics()), r"not \(list, Metrics\)"),
        (lambda values: (values, {"mine": 1.0}), r"not \(Tensor, dict\)"),
        (lambda values: (values.mean(), Metrics()), r"not values of the shape \[\]"),
        (lambda values: (values[1:], Metrics()), r"not values of the shape \[\d+\]"),
        (lambda values: (values[:, None], Metrics()), r"not values of the shape \[\d+, 1\]"),
    ],
)
def test_a_loss_that_returns_no_value_for_each_token_is_named_with_its_place(
    made: Callable[[torch.Tensor], object], words: str
) -> None:
    class Own(WeightedLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            return made(at_trained(batch, output.logprobs))  # type: ignore[return-value]

    batch, output = fill(random_groups(0), 0)
    with pytest.raises(DataError, match=rf"Own\.per_token \(.*test_weighted\.py:\d+\) must return .*, {words}"):
        Own()(output, batch.weigh("token"))


def test_a_metric_is_not_called_like_the_loss() -> None:
    class Own(WeightedLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            return -at_trained(batch, output.logprobs), Metrics().mean("loss", 1.0)

    batch, output = fill(random_groups(0), 0)
    with pytest.raises(DataError, match=r"Own\.per_token \(.*\) gives a metric the name 'loss'.*: choose another name"):
        Own()(output, batch.weigh("token"))


def test_an_output_or_a_column_that_is_not_asked_for_is_named_with_the_place_of_the_loss() -> None:
    class Entropy(WeightedLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            return at_trained(batch, output.entropy), Metrics()  # type: ignore[arg-type]

    class Surprise(WeightedLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            return at_trained(batch, batch.column("surprise")), Metrics()

    batch, output = fill(random_groups(0), 0)
    output.entropy = None
    words = r"is None: a loss names the outputs that it needs in `outputs`"
    with pytest.raises(DataError, match=rf"^Entropy\.per_token \(.*test_weighted\.py:\d+\): .* {words}"):
        Entropy()(output, batch)
    with pytest.raises(
        DataError, match=r"^Surprise\.per_token \(.*test_weighted\.py:\d+\): the column 'surprise' is not"
    ):
        Surprise()(output, batch)


def test_metrics_under_names_that_another_part_uses_are_refused() -> None:
    with pytest.raises(DataError, match=r"'accuracy' is whet's own, .*: choose another name"):
        Metrics().mean("accuracy", 3.0, 4.0).join(Metrics().mean("accuracy", 1.0))
    assert Metrics().mean("a", 3.0, 4.0).join(Metrics().max("b", 1.0)).result() == {"a": 0.75, "b": 1.0}
    with pytest.raises(DataError, match="the name of a metric must be a text, not 3"):
        Metrics().mean(3, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", ["logprobs", "advantages", "surprise"])
def test_a_loss_that_changes_what_it_gets_is_named_with_its_place(changed: str) -> None:
    class Clamps(WeightedLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            values = output.logprobs if changed == "logprobs" else batch.column(changed)
            values *= 2
            return -at_trained(batch, output.logprobs), Metrics()

    batch, output = fill(random_groups(0), 0)
    output.logprobs = output.logprobs * 1  # not a leaf
    batch.fill("surprise", torch.ones(len(batch)))
    batch.fill("advantages", torch.ones(len(batch)))
    with pytest.raises(DataError, match=rf"Clamps.per_token \(.*test_weighted.py:\d+\) changes '{changed}' in place"):
        Clamps()(output, batch)
