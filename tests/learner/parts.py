"""Helpers of the learner's tests: tiny models in a folder, workers over them, batches and small losses."""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from tests.groups import group
from whet.config import Config
from whet.core.batch import Batch, ModelOutput, Output
from whet.core.packing import MicroBatch, pack
from whet.core.types import Group
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.learner import computed
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.worker import LearnerWorker
from whet.losses.base import Unit
from whet.metrics import Metrics
from whet.models.config import LoraSettings, ModelConfig
from whet.parallel.parameters import full_tensors
from whet.weights.named_weights import ModelWeights, StagedWeights

VOCABULARY = 32
ADAMW = OptimizerConfig(lr=1e-2)
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


class PolicyGradient(Config):
    """-w A lp, the simplest loss; ``unit`` token."""

    reads: ClassVar[frozenset[str]] = frozenset()
    outputs: ClassVar[frozenset[Output]] = frozenset({"logprobs"})
    unit: ClassVar[Unit] = "token"

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        advantages = batch.per_token(batch.reward - 0.3)
        per_token = -advantages * output.logprobs
        return (batch.weight * per_token).sum(), Metrics().sum("seen", float(batch.trained.sum()))


class SequenceRatio(PolicyGradient):
    """A loss that is a non-linear function of each sequence's log-prob."""

    unit: ClassVar[Unit] = "sequence"

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        total = batch.per_sequence(output.logprobs) / batch.trained_per_sequence.clamp(min=1)
        return (batch.weight * batch.per_token(torch.exp(total) * (batch.reward + 1))).sum(), Metrics()


class BestOfGroup(PolicyGradient):
    """A loss that compares the members of a group."""

    unit: ClassVar[Unit] = "group"

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        total = batch.per_sequence(output.logprobs)
        sums = total.new_zeros(len(batch.group_uids)).index_add(0, batch.group, total)
        margin = torch.nn.functional.softplus(batch.reward.to(total) * (sums[batch.group] - 2 * total))
        return (batch.weight * batch.per_token(margin)).sum(), Metrics()


class Poisoned(PolicyGradient):
    """The loss, or only its gradient, is not finite."""

    what: Literal["loss", "gradient"] = "loss"

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = PolicyGradient.__call__(self, output, batch)
        if self.what == "loss":
            return loss * float("nan"), metrics
        return loss + 0.0 * (output.logprobs.sum() * 0.0).sqrt(), metrics


class WithEntropy(PolicyGradient):
    outputs: ClassVar[frozenset[Output]] = frozenset({"logprobs", "entropy"})

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        assert output.entropy is not None
        return -(batch.weight * output.entropy).sum(), Metrics()


class ValueLoss(PolicyGradient):
    """Squared error of the values to the rewards."""

    outputs: ClassVar[frozenset[Output]] = frozenset({"values"})

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        assert output.values is not None
        return (batch.weight * (output.values - batch.per_token(batch.reward)) ** 2).sum(), Metrics()


def save_model(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


class Chosen:
    """The type of the learners that ``worker`` and ``settings_of`` build; see the fixture ``learner_type``."""

    type = "torch"


def settings_of(precision: str = "float64", **more: Any) -> LearnerConfig:
    """Return settings for exact comparisons. Skips the test if the chosen type can't compute in this precision."""
    if Chosen.type == "megatron" and precision == "bfloat16":
        pytest.skip("Megatron Core's layers have no bfloat16 on CPUs")
    return LearnerConfig(**{"type": Chosen.type, "precision": precision, "matmul_precision": "highest", **more})


def worker(
    model: Path,
    *,
    precision: str = "float64",
    lora: LoraSettings | None = None,
    optimizer: OptimizerConfig | None = ADAMW,
    learner: dict[str, Any] | None = None,
    **more: Any,
) -> LearnerWorker:
    if Chosen.type == "megatron" and lora is not None and (lora.dora or lora.quantize or lora.experts):
        pytest.skip("Megatron Core's layers have plain LoRA here")
    return LearnerWorker(
        WorkerConfig(
            model=ModelConfig(path=str(model), lora=lora),
            learner=settings_of(**{"precision": precision, **(learner or {})}),
            optimizer=optimizer,
            **{"steps": 10, **more},
        )
    )


def some_batch(seed: int = 0, share_prompts: bool = True) -> Batch:
    """Two groups, five sequences, one of them with nothing trained; weighed by tokens."""
    random = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=random).tolist()

    made = [group("a", tokens(7), [tokens(5), tokens(9), tokens(2)]), group("b", tokens(4), [tokens(3), tokens(6)])]
    made[0].trajectories[2].spans[1].trained = False
    return Batch.from_groups(made, share_prompts=share_prompts).weigh("token")


def whole(batch: Batch) -> list[MicroBatch]:
    return [MicroBatch(batch, batch.segment_start)]


def cut(batch: Batch, max_tokens: int, unit: Unit = "token") -> list[MicroBatch]:
    return list(pack(batch, 1, max_tokens, unit, sequences=computed(batch, unit == "group"))[0])


def gradients(learner: LearnerWorker, micro_batches: Sequence[MicroBatch], loss: PolicyGradient) -> dict[str, Tensor]:
    learner.accumulate(micro_batches, loss)
    return stored(learner, ((name, p.grad) for name, p in learner.module.by_name() if p.grad is not None))


def weights(learner: LearnerWorker) -> dict[str, Tensor]:
    return stored(learner, ((name, p.detach()) for name, p in learner.module.by_name()))


def stored(learner: LearnerWorker, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of tensors of parameters under the names in files, which are the same for every type."""
    names = learner.module.shards.parameters.stored
    return {name: part.clone() for own, tensor in named for name, part in names(own, tensor).items()}


def published(learner: LearnerWorker) -> dict[str, Tensor]:
    """All weights as a generator gets them, LoRA merged. Of several ranks all must ask together, and all get them."""
    own = ModelWeights(learner.model, lambda tensors: full_tensors(tensors, learner.device))
    pipeline = learner.module.pipeline
    return dict((own if pipeline is None else StagedWeights(pipeline, own)).tensors())


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal to the last bit."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 5e-6) -> None:
    """Equal up to ``tolerance`` of the largest number: transformers' norms compute in float32, also in a float64 model,
    so this is as close as two layouts come."""
    assert a.keys() == b.keys()
    scale = max((float(t.abs().max()) for t in a.values()), default=0.0)
    far = {name: float((a[name] - b[name]).abs().max()) for name in a}
    assert {name: error for name, error in far.items() if error > tolerance * scale + 1e-12} == {}


def assert_layout_does_not_matter(
    learner: LearnerWorker,
    groups: Sequence[Group],
    loss: Any,
    laid_out: Callable[..., Batch],
    room: int,
    order: random.Random,
) -> None:
    """The gradient stays the same under micro-batches, their order, the order of groups, and unshared prompts.
    ``laid_out(groups, share_prompts=True)`` gives the weighed batch with all columns that the loss needs."""
    batch = laid_out(groups)
    expected = gradients(learner, whole(batch), loss)
    shuffled = list(groups)
    order.shuffle(shuffled)
    small = cut(batch, longest(groups) + room, loss.unit)
    separate = laid_out(groups, share_prompts=False)
    assert_close(expected, gradients(learner, small, loss))
    assert_close(expected, gradients(learner, list(reversed(small)), loss))
    assert_close(expected, gradients(learner, whole(laid_out(shuffled)), loss))
    assert_close(expected, gradients(learner, cut(separate, len(separate), loss.unit), loss))


def longest(groups: Sequence[Group]) -> int:
    """Tokens of the longest group laid out whole."""
    return max(len(Batch.from_groups([one])) for one in groups)
