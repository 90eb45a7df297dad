"""One rank of a learner: a model and its optimizer. It scores micro-batches and trains on them; its ``state`` is saved
and loaded, its ``weights`` are published. A loss is only a function of a model's output and a batch here.

All ranks run the same calls together. They communicate when the model is built (``whet.parallel``), inside its forward
and backward passes, when the gradient norm is computed, and when weights and state are gathered.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError, naming
from whet.cluster.base import RankInfo
from whet.cluster.rendezvous import LOOPBACK
from whet.core.batch import Batch, ModelOutput, Output
from whet.core.packing import MicroBatch
from whet.learner.balance import Balance
from whet.learner.base import CONSTANT, LearnerFacts, RankUpdate, Top
from whet.learner.config import OUTPUTS, WorkerConfig
from whet.learner.dump import read_dump
from whet.learner.memory import computing, loading, optimizing
from whet.learner.model import LearnerModel, build_model
from whet.learner.optimizer import (
    build_optimizer,
    distributed,
    gradient_norm,
    learning_rate,
    scale_gradients,
    set_rate,
)
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.optimizer_state import make_moments, move_moments
from whet.learner.passes import forward, forward_backward, measure, seeded_dropout
from whet.learner.precision import set_matmul_precision, with_precision
from whet.learner.profiler import Profiler
from whet.learner.skipping import SkippedStep
from whet.learner.state import LearnerState, Progress
from whet.losses.base import Loss
from whet.losses.weighted import WeightedLoss
from whet.metrics import Metrics
from whet.models.adapters import without_adapters
from whet.models.attention.forest import supports_forest
from whet.models.attention.states import supports_prefix_fork
from whet.models.device import be_deterministic, choose_device
from whet.models.moe.routing import follow_routes
from whet.parallel.fsdp import reshard
from whet.parallel.mesh import Ranks, join
from whet.parallel.parameters import first_not_finite
from whet.processes.user_code import place_of_user
from whet.weights.named_weights import requested_weights
from whet.weights.sender import Sender
from whet.weights.shared_memory import settle

# Collectives raise after the deadline of the call that they are part of, so that the controller finds the rank that
# hangs before the ranks that wait for it fail, which would look like an error of theirs.
_LATER = 1.1


class LearnerWorker:
    """A model that scores and, with an optimizer, is trained."""

    def __init__(self, config: WorkerConfig, info: RankInfo | None = None) -> None:
        self.info = info or RankInfo()
        self.device = choose_device(config.learner.device, self.info.rank)
        if config.learner.deterministic:
            be_deterministic()
        self.ranks: Ranks | None = None
        if max(self.info.ranks, config.parallel.ranks) > 1:
            self.ranks = join(config.parallel, self.info, self.device, _LATER * config.learner.deadline)
        self.config = config = with_precision(config, self.device, self.ranks)
        self.trains = config.optimizer is not None
        self.module = self._build(train=self.trains)
        if config.follows_routes:
            follow_routes(self.model)
        self.reference: LearnerModel | None = None  # loaded when first needed
        if config.learner.activation_checkpointing and self.trains:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        made_to_train = {name for name, parameter in self.module.by_name() if parameter.requires_grad}
        self.optimizer = self._optimizer(config.optimizer) if config.optimizer else None
        if config.optimizer is not None and config.optimizer.groups:
            self.module.measure()  # some parameters may be frozen now
        products = set_matmul_precision(config.learner, self.device, self.ranks)
        lora = config.model.lora
        progress = Progress(
            products,
            optimizer=config.optimizer.type if config.optimizer else "adamw",
            adapter=lora.unseen if lora is not None else {},
        )
        self.state = LearnerState(self.module, self.optimizer, progress, config.learner, self.ranks, made_to_train)
        self.profiler: Profiler | None = None
        self.balance: Balance | None = None
        if self.trains and config.head == "language" and config.learner.balance is not None:
            self.balance = Balance(self.module, config.learner.balance, self.ranks)
        self.weights = Sender(
            partial(requested_weights, self.module, self.device, self.ranks),
            self.ranks,
            self.device,
            self.info.remote,
            self.info.rendezvous.rpartition(":")[0] or LOOPBACK,
        )

    @property
    def model(self) -> nn.Module:
        """The language model, or PEFT's wrapper of it."""
        return self.module.model

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def facts(self) -> LearnerFacts:
        hf: Any = self.model.config
        return LearnerFacts(
            self.config.model,
            self.config.head,
            self.module.size,
            self.module.trained_size,
            self.config.learner.computes_in,
            self.progress.matmul_precision,
            str(self.device),
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "",
            self.info.ranks,
            torch.get_num_threads(),
            supports_forest(hf) or (supports_prefix_fork(hf) and self._keeps_states()),
            int(hf.get_text_config().vocab_size),
            self.progress.step,
        )

    def _keeps_states(self) -> bool:
        """Return whether layers can use caches and be called any number of times on this rank."""
        learner = self.config.learner
        return self.ranks is None and not (learner.activation_checkpointing or learner.compile)

    # Forward only

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[MicroBatch], columns: Set[str], top: Top | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the columns of each micro-batch, [n] or [n, K], on the CPU, in float32 or wider."""
        head, outputs = self.config.head, OUTPUTS[self.config.head] & columns
        possible = OUTPUTS[head] | ({"reference_logprobs"} if head == "language" else set[str]())
        if columns - possible:
            raise WhetError(f"a learner with a {head} head scores {sorted(possible)}, not {sorted(columns - possible)}")
        if "topk_ids" in columns and top is None:
            raise WhetError("the most likely tokens were requested without their number; pass top")
        self.model.eval()
        batches = [micro.batch for micro in micro_batches]
        scored: list[dict[str, Tensor]] = [{} for _ in batches]

        def keep(results: Sequence[ModelOutput], names: Set[Output], prefix: str = "") -> None:
            for result, kept in zip(results, scored, strict=True):
                kept |= {prefix + name: result.column(name) for name in names}

        of_top = outputs & {"topk_ids", "topk"} if top is not None else frozenset[Output]()
        with computing("scoring", batches):
            if given := outputs - of_top:
                keep(forward(self.module, batches, given), given)
            if "reference_logprobs" in columns:
                keep(self._score_reference(batches), {"logprobs"}, "reference_")
            if of_top:
                keep(forward(self.module, batches, set(), top), of_top)
        reshard(self.module)
        return scored

    def _score_reference(self, batches: Sequence[Batch]) -> list[ModelOutput]:
        """Score with the reference model, whose weights are the run's initial weights."""
        model = self.model
        batches = [replace(batch, experts=None) for batch in batches]  # the recorded experts are the policy's
        if hasattr(model, "peft_config"):
            with without_adapters(model):
                return forward(self.module, batches, set())
        if self.trains and self.reference is None:
            self.reference = self._build(train=False)
        return forward(self.reference or self.module, batches, set())

    def release_reference(self) -> None:
        """Free the reference model; it is loaded again when needed."""
        self.reference = None

    # Learning

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> RankUpdate:
        """Run forward and backward passes over the micro-batches, then one optimizer step.

        If the loss or the gradient norm is not finite on any rank, weights, moments and schedule don't change. See
        ``whet.learner.skipping``; ``max_skipped_steps`` consecutive such steps raise ``WhetError``.
        """
        config, progress = self.config.optimizer, self.progress
        if self.optimizer is None or config is None:
            raise WhetError("this learner has no optimizer, so it can score but not update")
        with optimizing("making the optimizer's moments"):
            make_moments(self.optimizer)
        total, metrics, logprobs = self.accumulate(micro_batches, loss)
        shard_loss, loss_value, norm_value = measure(self.module, total, self.ranks)
        lr = learning_rate(config, progress.step, self.config.steps)
        finite, skipped = math.isfinite(loss_value) and math.isfinite(norm_value), ""
        if finite:
            if norm_value > config.max_grad_norm:
                scale_gradients(self.module.parameters(), config.max_grad_norm / (norm_value + 1e-6))
            set_rate(self.optimizer, lr)
            with optimizing("taking the optimizer's step"):
                self.optimizer.step()
            if self.balance is not None:
                metrics.merge(self.balance.step())
            progress.step += 1
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            step = SkippedStep(progress, loss_value, norm_value, micro_batches, self.module.gradients())
            dump = step.dump(self.config.dumps, loss, self.ranks) if self.config.dumps is not None else None
            step.check(self.config.learner.max_skipped_steps, dump)
            skipped = step.described(dump)
        self.optimizer.zero_grad(set_to_none=True)  # generation between two updates gets the memory
        return RankUpdate(shard_loss, metrics, logprobs, norm_value, lr, skipped)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> tuple[Tensor, Metrics, list[Tensor]]:
        """Compute new gradients, summed over the micro-batches; return the loss [], its metrics, and the log-probs of
        each, [n]."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        if self.balance is not None:
            self.balance.reset()
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), Metrics()
        logprobs: dict[int, Tensor] = {}
        batches = [micro.batch for micro in micro_batches]  # on the CPU, where the model's layout is computed
        of_loss = [batch.to(self.device) for batch in batches]

        def loss_of(number: int, output: ModelOutput) -> Tensor:
            value, reported = loss(output, of_loss[number])
            if not value.requires_grad:  # for example where the loss masks all tokens; other ranks wait for this one
                value = value + sum(column[:0].sum() for column in output.columns().values())
                reported = Metrics().merge(reported).sum(CONSTANT, 1)
            total.add_(value.detach())
            with naming(place_of_user(type(loss), "per_token" if isinstance(loss, WeightedLoss) else "__call__")):
                metrics.merge(reported)
            logprobs[number] = output.logprobs.detach().float()
            return value

        dropout = seeded_dropout(self.module, self.config.seed, self.info.shard, self.progress.step)
        with dropout, computing("learning from", batches):
            forward_backward(self.module, batches, loss.outputs, loss_of)
        reshard(self.module)  # a stage of a pipeline that is all frozen has no backward pass, which would do it
        result = (total.cpu(), metrics.read(), [logprobs[number].cpu() for number in sorted(logprobs)])
        if self.module.pipeline is not None:
            result = self.module.pipeline.from_last(result)
        return result[0].to(self.device), *result[1:]

    def replay(self, dump: Path, loss: Loss) -> Sequence[Mapping[str, object]]:
        """Return, for each micro-batch of a skipped step's dump, its effect with the current weights, which are not
        changed: ``loss``, ``gradient_norm``, and ``not_finite``, the first parameter whose gradient is not finite (or
        None)."""
        if self.ranks is not None:
            raise WhetError(
                "a dump must be replayed by a single process; it does not depend on how the model was sharded"
            )
        results = []
        for micro in read_dump(dump)[0]:
            total, _, _ = self.accumulate([micro], loss)
            norm, not_finite = gradient_norm(self.module.parameters()), first_not_finite(self.module.gradients())
            results.append({"loss": float(total), "gradient_norm": float(norm), "not_finite": not_finite})
        return results

    # Profile

    def begin_profile(self, micro_batches: int) -> None:
        """Record the computations of the first rank."""
        if self.info.rank == 0:
            self.profiler = Profiler(micro_batches, self.optimizer, self.device)

    def end_profile(self, path: Path | None = None) -> None:
        """Write the profile, or drop it."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.end(path)

    # Room on the device

    def sleep(self) -> None:
        """Move the optimizer's moments to the CPU and free the gradients. The model stays, because the generator gets
        its weights from it."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            move_moments(self.optimizer, torch.device("cpu"))
            settle(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the moments back to the device."""
        if self.optimizer is not None:
            move_moments(self.optimizer, None)

    def close(self) -> None:
        """Free everything large, and leave the process groups."""
        self.end_profile()
        self.weights.close()
        del self.module, self.reference, self.optimizer, self.state, self.weights
        if self.ranks is not None:
            self.ranks.destroy()

    # Parts

    def _build(self, *, train: bool) -> LearnerModel:
        """Build this learner's model, or with ``train`` false its reference model."""
        with loading(self.config.model.path, self.device):
            return build_model(
                self.config.model,
                self.config.learner.computes_in,
                self.device,
                self.ranks,
                train=train,
                value_head=self.config.head == "value",
                seed=self.config.seed,
                compiled=self.config.learner.compile,
                recomputed=self.config.learner.activation_checkpointing,
                attention=self.config.learner.attention,
                float8=self.config.learner.float8,
                megatron=self.config.learner.type == "megatron",
                whole=train and self.config.learner.distributed_optimizer,
            )

    def _optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        made = build_optimizer(self.module.by_name(), config, self.module.pipeline)
        if self.config.learner.distributed_optimizer:
            return distributed(made, self.module, self.ranks)
        return made
