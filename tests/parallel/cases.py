"""A few training steps of a learner in any layout, with all its outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  imported once, in the server that ranks are forked from
from torch import Tensor

from tests.groups import group
from tests.learner.parts import VOCABULARY, PolicyGradient, ValueLoss, WithEntropy, published
from tests.parallel.ranks import info_of
from tests.tiny_vision import asked
from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.packing import MicroBatch, pack
from whet.core.types import Distribution, Span
from whet.learner.base import LearnerFacts, Top
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.worker import LearnerWorker
from whet.models.config import LoraSettings, ModelConfig, Vision
from whet.models.families import PICTURE
from whet.models.loading import load_images
from whet.parallel.config import ParallelConfig
from whet.parallel.parameters import full_tensor, local

CPU = torch.device("cpu")
LANGUAGE = {"logprobs", "entropy", "topk", "reference_logprobs", "topk_ids"}
ENOUGH = 10_000  # tokens of a micro-batch that contains the whole batch
RECOMPUTED = {"activation_checkpointing": True}  # for ``learner`` of a case
TOP_P = Distribution(temperature=0.7, top_p=0.9)
LOSSES = {"policy": PolicyGradient(), "entropy": WithEntropy(), "value": ValueLoss()}


@dataclass(frozen=True)
class Case:
    """The settings of a learner and of its training data."""

    model: Path
    parallel: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    lora_settings: dict[str, Any] = field(default_factory=dict)
    loss: str = "policy"
    learner: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 40
    groups: int = 6  # of a batch: three make about two micro-batches
    distribution: Distribution = field(default_factory=lambda: Distribution(temperature=0.7))
    steps: int = 2
    trains: bool = True
    follows_routes: bool = False
    vision: Vision | None = None  # the first prompt of three then has an image

    @property
    def ranks(self) -> int:
        return ParallelConfig(**self.parallel).ranks

    def one_rank(self) -> "Case":
        """The same on one rank by torch."""
        plain = {"type": "torch", "distributed_optimizer": False}
        return replace(self, parallel={}, max_tokens=ENOUGH, learner={**self.learner, **plain})


@dataclass
class Outputs:
    """The outputs of a learner on one rank: full tensors, by name."""

    scored: dict[str, Tensor]  # [N] before the first step, by column; 0 except for this shard's trained tokens
    scored_after: dict[str, Tensor]  # the same after the last step, when the model differs from its reference
    gradients: dict[str, Tensor]  # of the first step
    losses: list[float]  # of this shard, by step
    norms: list[float]
    weights: dict[str, Tensor]  # after the last step
    published: dict[str, Tensor]  # the same as published to a generator
    described: LearnerFacts


def batch_of(case: Case, step: int) -> Batch:
    """Return a batch of groups with shared prompts, different for each step."""
    random = torch.Generator().manual_seed(step)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=random).tolist()

    sizes = [(7, [5, 9, 2]), (4, [3, 6]), (11, [8, 1, 13])]  # tokens of a prompt, and of its answers
    groups_of_prompts = [
        group(f"group {number}", tokens(prompt), [tokens(size) for size in answers])
        for number, (prompt, answers) in enumerate(islice(cycle(sizes), case.groups))
    ]
    if case.vision is not None:
        images = load_images(ModelConfig(path=str(case.model)))
        for trajectory in [each for group in groups_of_prompts[::3] for each in group.trajectories]:
            trajectory.spans.insert(0, Span(list(images.tokens(PICTURE)), False))
            trajectory.messages.append(asked(PICTURE))
    batch = Batch.from_groups(groups_of_prompts, distribution=case.distribution).weigh("sequence")
    batch.fill("topk_ids", torch.randint(0, VOCABULARY, (len(batch), 3), generator=random))
    random.manual_seed(step)
    both = torch.tensor([0, 1]) + torch.randint(0, 3, (len(batch), 2, 1), generator=random)
    unknown = torch.rand(len(batch), generator=random) < 0.2
    batch.experts = torch.where(unknown[:, None, None], -1, both).to(torch.int16)
    return batch


def build(case: Case, rendezvous: str, rank: int) -> LearnerWorker:
    parallel = ParallelConfig(**case.parallel)
    settings = {"precision": "float64", "matmul_precision": "highest", "deadline": 120.0, **case.learner}
    optimizer = {"lr": 1e-2, "max_grad_norm": 0.05, "weight_decay": 0.1, **case.optimizer}
    lora = LoraSettings(rank=2, alpha=4.0, **case.lora_settings) if case.lora else None
    config = WorkerConfig(
        model=ModelConfig(path=str(case.model), lora=lora, vision=case.vision),
        learner=LearnerConfig(**settings),
        parallel=parallel,
        optimizer=OptimizerConfig(**optimizer) if case.trains else None,
        head="value" if case.loss == "value" else "language",
        steps=10,
        seed=3,
        follows_routes=case.follows_routes,
    )
    worker = LearnerWorker(config, info_of(rendezvous, rank, parallel.ranks, parallel.ranks_per_shard))
    if case.lora and case.trains:  # B is initialised to zero, so A would get no gradient
        with torch.no_grad():
            for name, parameter in worker.module.by_name():
                if "lora_B" in name:
                    parameter.fill_(0.02)
    return worker


def parameter_counts(rendezvous: str, rank: int, cases: list[Case]) -> list[int]:
    """Return the number of parameters on this rank."""
    return [sum(local(p).numel() for p in build(case, rendezvous, rank).module.parameters()) for case in cases]


def build_errors(rendezvous: str, rank: int, cases: list[Case]) -> list[str]:
    messages = []
    for case in cases:
        with pytest.raises(WhetError) as caught:
            build(case, rendezvous, rank)
        messages.append(str(caught.value))
    return messages


def full(worker: LearnerWorker, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors from this rank's parts of parameters, under the names in files."""
    stored = worker.module.shards.parameters.stored
    return whole(part for own, tensor in named for part in stored(own, tensor).items())


def whole(parts: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: full_tensor(part, CPU).clone() for name, part in parts}


def full_weights(worker: LearnerWorker) -> dict[str, Tensor]:
    return full(worker, ((name, p.detach()) for name, p in worker.module.by_name()))


def micro_batches(case: Case, worker: LearnerWorker, step: int) -> Sequence[MicroBatch]:
    """Return the micro-batches of this rank's shard of a batch."""
    unit, info = LOSSES[case.loss].unit, worker.info
    return pack(batch_of(case, step), info.shards, case.max_tokens, unit)[info.shard]


def score(case: Case, worker: LearnerWorker) -> dict[str, Tensor]:
    """Return columns of the first batch, 0 for tokens of other shards."""
    columns = {"values"} if case.loss == "value" else LANGUAGE
    micro, size = micro_batches(case, worker, 0), len(batch_of(case, 0))
    top = None if case.loss == "value" else Top(4, VOCABULARY - 3)
    answers = worker.score(micro, columns, top)
    scores = {name: t.new_zeros(size, *t.shape[1:]) for name, t in answers[0].items()}
    for micro_batch, answer in zip(micro, answers, strict=True):
        trained = micro_batch.batch.trained
        for name, column in answer.items():
            scores[name][micro_batch.tokens[trained]] = column[trained]
    return scores


def score_all(rendezvous: str, rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [score(case, build(case, rendezvous, rank)) for case in cases]


def train(rendezvous: str, rank: int, case: Case) -> Outputs:
    """Score, train a few steps, and score again."""
    worker = build(case, rendezvous, rank)
    loss = LOSSES[case.loss]

    def micro(step: int) -> Any:
        return micro_batches(case, worker, step)

    count = len(micro(0))
    assert count > 1 or case.max_tokens == ENOUGH, f"rank {rank} has {count} micro-batch of {case.max_tokens} tokens"
    scored = score(case, worker)
    worker.accumulate(micro(0), loss)
    parts = worker.module.shards.parameters.gradients
    trained = [(name, p) for name, p in worker.module.by_name() if p.grad is not None]
    gradients = whole(part for name, p in trained for part in parts(name, p).items())
    updates = [worker.update(micro(step), loss) for step in range(case.steps)]
    skipped = [step for step, update in enumerate(updates) if update.skipped]
    assert not skipped, f"rank {rank} skipped the updates {skipped} of {case.steps}"
    return Outputs(
        scored,
        score(case, worker),
        gradients,
        [update.loss for update in updates],
        [update.gradient_norm for update in updates],
        full_weights(worker),
        {name: t.clone() for name, t in published(worker).items()},
        worker.facts(),
    )


def train_all(rendezvous: str, rank: int, cases: list[Case]) -> list[Outputs]:
    return [train(rendezvous, rank, case) for case in cases]
