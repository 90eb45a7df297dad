"""The controller's side: whole batches in, whole columns out."""

import asyncio
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.learner.parts import (
    ADAMW,
    VOCABULARY,
    BestOfGroup,
    Poisoned,
    PolicyGradient,
    SequenceRatio,
    settings_of,
    some_batch,
    whole,
    worker,
)
from tests.weights.collected import weights_of
from whet.base.errors import DataError, DeadlineError, WhetError
from whet.cluster.local import LocalCluster
from whet.core.batch import Batch, ModelOutput
from whet.learner.config import WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.metrics import Metrics
from whet.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("learner_type")


def config(model: Path, **learner) -> WorkerConfig:
    settings = settings_of(**{"max_tokens": 16, **learner})
    return WorkerConfig(model=ModelConfig(path=str(model)), learner=settings, optimizer=ADAMW, steps=10)


def with_learner(settings, test):
    async def run():
        learner = await WorkerLearner.launch(LocalCluster(), settings)
        try:
            return await test(learner)
        finally:
            await learner.close()

    return asyncio.run(run())


def test_columns_come_back_in_the_order_of_the_batch(llama):
    batch = some_batch()
    expected = worker(llama).score(whole(batch), frozenset({"logprobs", "entropy"}))[0]
    found = with_learner(config(llama), lambda learner: learner.score(batch, {"logprobs", "entropy"}))
    for name, column in expected.items():
        torch.testing.assert_close(found[name], column, atol=1e-6, rtol=0)


def test_a_token_that_the_model_does_not_have_is_named(llama):
    batch = some_batch()
    batch.tokens[-1] = VOCABULARY
    words = f"the batch has token {VOCABULARY}, and the model .* has only {VOCABULARY} tokens"
    for call in (lambda it: it.score(batch, {"logprobs"}), lambda it: it.update(batch, PolicyGradient())):
        with pytest.raises(DataError, match=words):
            with_learner(config(llama), call)


@pytest.mark.parametrize(
    "loss", [PolicyGradient(), SequenceRatio(), BestOfGroup()], ids=lambda loss: type(loss).__name__
)
def test_an_update_equals_that_of_a_worker_with_the_whole_batch(llama, loss):
    batch = some_batch()
    expected = worker(llama).update(whole(batch), loss)
    found = with_learner(config(llama, max_tokens=40), lambda learner: learner.update(batch, loss))
    numbers = found.metrics.result()
    assert numbers["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert numbers["gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert numbers["learner/tokens"] == int(batch.trained.sum())
    assert numbers["learner/skipped"] == 0
    assert numbers["lr"] == 1e-2
    torch.testing.assert_close(found.logprobs, expected.logprobs[0], atol=1e-5, rtol=0)
    assert found.logprobs.dtype == torch.float32


def test_metrics_of_losses_add_up_over_micro_batches(llama):
    batch = some_batch()
    found = with_learner(config(llama), lambda learner: learner.update(batch, PolicyGradient()))
    numbers = found.metrics.result()
    assert numbers["learner/micro_batches"] > 2
    assert numbers["seen"] == numbers["learner/tokens"]


def test_a_skipped_step_reports_nothing_that_is_not_finite(llama):
    found = with_learner(config(llama), lambda learner: learner.update(some_batch(), Poisoned()))
    numbers = found.metrics.result()
    assert numbers["learner/skipped"] == 1
    assert "loss" not in numbers
    assert all(number == number for number in numbers.values())


def test_a_batch_that_trains_nothing_changes_nothing(llama):
    batch, _ = some_batch().select(torch.tensor([2]))

    async def test(learner):
        before = [(name, tensor.clone()) for name, tensor in await weights_of(learner, torch.float64)]
        update = await learner.update(batch, PolicyGradient())
        assert update.metrics.result() == {"learner/empty": 1}
        assert update.logprobs.tolist() == [0.0] * len(batch)
        assert (await learner.score(batch, {"logprobs"}))["logprobs"].tolist() == [0.0] * len(batch)
        for (name, old), (_, new) in zip(before, await weights_of(learner, torch.float64), strict=True):
            assert torch.equal(old, new), name

    with_learner(config(llama), test)


class Needy(PolicyGradient):
    reads = frozenset({"advantages"})


class Misspelt(PolicyGradient):
    reads = frozenset({"advantage"})


def test_what_a_loss_needs_is_checked_before_anything_runs(llama):
    async def test(learner):
        batch = some_batch()
        with pytest.raises(WhetError, match="advantages"):
            await learner.update(batch, Needy())
        with pytest.raises(WhetError, match=r"\['advantage'\], which are not filled"):
            await learner.update(batch, Misspelt())
        batch.share = None
        with pytest.raises(WhetError, match="no weights"):
            await learner.update(batch, PolicyGradient())

    with_learner(config(llama), test)


def test_it_saves_and_loads_and_says_how_far_it_is(llama, tmp_path):
    async def test(learner):
        await learner.update(some_batch(), PolicyGradient())
        await learner.save(tmp_path)
        return dict(await weights_of(learner, torch.float64))

    saved = with_learner(config(llama), test)

    async def again(learner):
        await learner.load(tmp_path)
        return learner.facts, dict(await weights_of(learner, torch.float64))

    facts, loaded = with_learner(config(llama), again)
    assert facts.steps_done == 1
    assert facts.forest is True
    assert facts.trained_parameters == facts.parameters == sum(t.numel() for t in loaded.values())
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


class Slow(PolicyGradient):
    released: ClassVar[threading.Event] = threading.Event()

    def __call__(self, output, batch):
        assert self.released.wait(240)
        return super().__call__(output, batch)


def test_a_call_past_its_deadline_is_an_error_that_names_it(llama):
    async def test(learner):
        learner._group.placement = type(learner._group.placement)(deadline=0.1)
        Slow.released.clear()
        try:
            with pytest.raises(DeadlineError, match=r"LearnerWorker\.update"):
                await learner.update(some_batch(), Slow())
        finally:
            Slow.released.set()
        learner._group.placement = type(learner._group.placement)(deadline=60.0)

    with_learner(config(llama), test)


def test_a_model_that_is_not_there_is_an_error_at_launch(tmp_path):
    with pytest.raises(WhetError, match="no such folder"):
        asyncio.run(WorkerLearner.launch(LocalCluster(), config(tmp_path / "nowhere")))


def test_a_skipped_step_is_a_warning_that_names_its_batch(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(learner: WorkerLearner) -> None:
        assert (await learner.update(some_batch(), PolicyGradient())).metrics.result()["learner/skipped"] == 0
        assert not caplog.messages
        assert (await learner.update(some_batch(), Poisoned())).metrics.result()["learner/skipped"] == 1

    with_learner(config(llama).model_copy(update={"dumps": tmp_path}), test)
    [folder] = tmp_path.iterdir()
    assert [text for text in caplog.messages if "skipped" in text] == [
        f"an optimizer step is skipped: the loss (nan) is not finite, so weights and moments stay as they are; its "
        f"batch is in {folder}"
    ]


def test_a_loss_without_a_gradient_is_named(llama: Path) -> None:
    class Constant(PolicyGradient):
        def __call__(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            loss, metrics = super().__call__(output, batch)
            return loss.detach(), metrics

    async def test(learner: WorkerLearner) -> None:
        with pytest.raises(DataError, match="the loss Constant has no gradient"):
            await learner.update(some_batch(), Constant())

    with_learner(config(llama), test)


class OfSomeTokens(PolicyGradient):
    """A loss without a gradient where no token of a micro-batch is below ``below``."""

    below: int

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
        mask = batch.trained & (batch.tokens < self.below)
        value = -(batch.weight * output.logprobs)[mask].sum() if mask.any() else torch.zeros(())
        return value, Metrics()


def test_the_first_step_of_a_resumed_learner_may_have_no_gradient(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def saved(learner: WorkerLearner) -> None:
        await learner.update(some_batch(), OfSomeTokens(below=VOCABULARY))
        await learner.save(tmp_path)

    async def resumed(learner: WorkerLearner) -> None:
        await learner.load(tmp_path)
        numbers = (await learner.update(some_batch(), OfSomeTokens(below=0))).metrics.result()
        assert numbers["learner/constant"] == numbers["learner/micro_batches"]

    with_learner(config(llama), saved)
    with_learner(config(llama), resumed)
    assert "the loss OfSomeTokens has no gradient" in caplog.text


def test_a_loss_may_have_no_gradient_in_a_micro_batch_and_later_in_a_step(llama: Path) -> None:
    batch = some_batch()
    rare = int(batch.tokens[batch.trained].min()) + 1
    expected = worker(llama).update(whole(batch), OfSomeTokens(below=rare))

    async def test(learner: WorkerLearner) -> None:
        first = (await learner.update(batch, OfSomeTokens(below=rare))).metrics.result()
        assert 0 < first["learner/constant"] < first["learner/micro_batches"]
        assert first["gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-5)
        later = (await learner.update(batch, OfSomeTokens(below=0))).metrics.result()
        assert (later["learner/constant"], later["gradient_norm"]) == (later["learner/micro_batches"], 0)

    with_learner(config(llama), test)


def test_a_metric_of_two_kinds_is_named_with_the_loss_that_records_it(llama: Path) -> None:
    class TwoKinds(PolicyGradient):
        def __call__(self, output: ModelOutput, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            loss, metrics = super().__call__(output, batch)
            first = bool((batch.tokens == some_batch().tokens[0]).any())
            return loss, metrics.max("ratio", 1.0) if first else metrics.mean("ratio", 1.0)

    async def test(learner: WorkerLearner) -> None:
        place = rf"TwoKinds.__call__ \({__file__}:[0-9]+\)"
        with pytest.raises(DataError, match=place + ": the metric 'ratio' is recorded once as (max|mean) and once as"):
            await learner.update(some_batch(), TwoKinds())

    with_learner(config(llama), test)
