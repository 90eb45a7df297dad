"""One rank of a learner: a model, its optimizer, and what they do with micro-batches. Scores, updates, saves, loads,
and hands out weights. Knows losses only as functions of a model's output and a batch.

Several ranks each run the same calls in step. They meet where the model is built (``whet.parallel``), inside its
forward and backward passes, where the gradient gets its norm, and where weights and state are put together.
"""

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.batch import Batch, ModelOutput
from whet.cluster.base import Seat
from whet.config import Config
from whet.errors import WhetError
from whet.learner import precision
from whet.learner.base import LearnerFacts, Top
from whet.learner.config import Head, LearnerConfig, OptimizerConfig
from whet.learner.keeping import Keeping
from whet.learner.optimizer import build_adamw, gradient_norm, learning_rate, scale_gradients
from whet.learner.passes import learn, say
from whet.learner.scorer import Scorer, build_scorer
from whet.learner.skipping import skip
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.models.forest_attention import supports_forest
from whet.packing import MicroBatch
from whet.parallel.config import ParallelConfig
from whet.parallel.fsdp import reshard
from whet.parallel.mesh import Ranks, join
from whet.parallel.parameters import squared_norm
from whet.seeds import derive_seed

COLUMNS = {
    "language": frozenset({"logprobs", "entropy", "topk", "reference_logprobs", "topk_ids"}),
    "value": frozenset({"values"}),
}
"""What ``score`` can be asked for, by head."""


class WorkerConfig(Config):
    """Everything that one worker of a learner is built from."""

    model: ModelConfig
    learner: LearnerConfig = LearnerConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen and only scores."""
    head: Head = "language"
    """What the learner says about tokens: their log-probs, or a critic's values."""
    steps: int = Field(0, ge=0)
    """Optimizer steps of the whole run: where a schedule ends."""
    seed: int = 0
    dumps: Path | None = None
    """Where the batches of skipped steps are written for replay. None: they are not."""


@dataclass(slots=True)
class RankUpdate:
    """What one rank says about one optimizer step."""

    loss: float  # summed over this rank's micro-batches
    metrics: Metrics  # the loss's own; additive over ranks
    logprobs: list[Tensor]  # [n] float32 on the CPU, for each micro-batch
    gradient_norm: float  # of the whole step, before clipping; the same on every rank
    lr: float
    skipped: bool


class LearnerWorker(Keeping):
    """A model that scores and, with an optimizer, learns."""

    def __init__(self, config: WorkerConfig, seat: Seat | None = None) -> None:
        self.config, self.seat = config, seat or Seat()
        self.precision = config.learner.precision
        self.device = _device(self.seat)
        self.ranks: Ranks | None = None
        if max(self.seat.ranks, config.parallel.ranks) > 1:
            self.ranks = join(config.parallel, self.seat, self.device, config.learner.deadline)
        self.trains = config.optimizer is not None
        self.scorer = self._scorer(train=self.trains)
        hf: Any = self.model.config
        text = hf.get_text_config()
        self.forest = supports_forest(hf)
        self.vocabulary = int(text.vocab_size)
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        self.matmul_precision = precision.choose_matmul_precision(
            config.learner.matmul_precision, self.precision, self.device, text.hidden_size, int(inner)
        )
        if self.ranks is not None:
            self.matmul_precision = self.ranks.first(self.matmul_precision)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if config.learner.activation_checkpointing and self.trains:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.dropout = bool(getattr(text, "attention_dropout", 0.0)) or any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules()
        )
        self.parameters, self.trained_parameters = self.scorer.sizes()
        self.reference: Scorer | None = None  # loaded when first asked for
        self.optimizer = build_adamw(self._parameters(), config.optimizer) if config.optimizer else None
        self.step = 0  # optimizer steps done; skipped ones don't count
        self.skipped = 0
        self.skipped_in_a_row = 0

    # Forward only

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[MicroBatch], columns: Set[str], top: Top | None = None
    ) -> list[dict[str, Tensor]]:
        """The columns of each micro-batch, [n] or [n, K], on the CPU, in float32 or wider."""
        known = COLUMNS[self.config.head]
        if columns - known:
            raise WhetError(
                f"a learner with a {self.config.head} head scores {sorted(known)}, not {sorted(columns - known)}"
            )
        if "topk_ids" in columns and top is None:
            raise WhetError("the likeliest tokens were asked for, but not how many; give top")
        likeliest = {"topk_ids", "topk"} if top is not None else set[str]()
        self.model.eval()
        batches = [micro.batch.to(self.device) for micro in micro_batches]
        results: list[dict[str, Tensor]] = [{} for _ in batches]
        own = columns - {"reference_logprobs"} - likeliest
        if own:
            for found, said in zip(results, say(self.scorer, batches, own, self.precision), strict=True):
                found |= {name: said[name] for name in own}
        if "reference_logprobs" in columns:
            for found, said in zip(results, self._of_reference(batches), strict=True):
                found["reference_logprobs"] = said["logprobs"]
        if columns & likeliest:
            for found, said in zip(results, say(self.scorer, batches, set(), self.precision, top), strict=True):
                found |= said
        reshard(self.scorer)
        return results

    def _of_reference(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """What is said under the weights that the run started from."""
        model: Any = self.model
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                return say(self.scorer, batches, set(), self.precision)
        if self.trains and self.reference is None:
            self.reference = self._scorer(train=False)
        return say(self.reference or self.scorer, batches, set(), self.precision)

    def release_reference(self) -> None:
        """Let go of the reference model; it is loaded again when asked for."""
        self.reference = None

    # Learning

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> RankUpdate:
        """Forward and backward over the micro-batches, then one optimizer step.

        Where the loss or the gradient's norm is not finite on any rank, nothing changes: not the weights, not the
        moments, not the schedule. See ``whet.learner.skipping``; ``max_skipped_steps`` of that in a row raise
        ``WhetError``.
        """
        config = self.config.optimizer
        if self.optimizer is None or config is None:
            raise WhetError("this learner has no optimizer, so it can score but not update")
        total, metrics, logprobs = self.accumulate(micro_batches, loss)
        own_loss, loss_value, norm_value = self._measure(total)
        lr = learning_rate(config, self.step, self.config.steps)
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            if norm_value > config.max_grad_norm:
                scale_gradients(self._parameters(), config.max_grad_norm / (norm_value + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            skip(self, micro_batches, loss, loss_value, norm_value)
        self.optimizer.zero_grad(set_to_none=True)  # generation between two updates gets the memory
        return RankUpdate(own_loss, metrics, logprobs, norm_value, lr, skipped=not finite)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> tuple[Tensor, Metrics, list[Tensor]]:
        """Fresh gradients, summed over the micro-batches: (loss [], the loss's metrics, log-probs of each, [n])."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), Metrics()
        logprobs: dict[int, Tensor] = {}
        batches = [micro.batch.to(self.device) for micro in micro_batches]

        def judged(number: int, output: ModelOutput) -> Tensor:
            value, reported = loss(output, batches[number])
            total.add_(value.detach())
            metrics.merge(reported)
            logprobs[number] = output.logprobs.detach().float()
            return value

        with self._seeded_dropout():
            learn(self.scorer, batches, loss.outputs, self.precision, judged)
        found = (total.cpu(), metrics, [logprobs[number].cpu() for number in sorted(logprobs)])
        if self.scorer.pipeline is not None:
            found = self.scorer.pipeline.from_last(found)
        return found[0].to(self.device), *found[1:]

    def _measure(self, total: Tensor) -> tuple[float, float, float]:
        """The loss of this shard of the data, that of the whole step, and the norm of its gradient: the latter two have
        the same bits on every rank, so that all ranks decide alike."""
        if self.ranks is None:
            loss, norm = torch.stack([total.double(), gradient_norm(self._parameters()).double()]).tolist()
            return loss, loss, norm
        gradients = [parameter.grad for parameter in self.scorer.counted() if parameter.grad is not None]
        squares = squared_norm(gradients, self.seat.ranks // self.config.parallel.pipeline).to(self.device)
        loss, squared = self.ranks.sum(torch.stack([total / self.config.parallel.ranks_per_shard, squares])).tolist()
        return float(total), loss, math.sqrt(squared) if squared >= 0 else math.nan

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the model and of its value head; on a pipeline's stage, those that are there."""
        yield from self.model.named_parameters()
        if self.scorer.value_head is not None:
            yield from self.scorer.value_head.named_parameters(prefix="value_head")

    def facts(self) -> LearnerFacts:
        return LearnerFacts(
            self.config.model,
            self.config.head,
            self.parameters,
            self.trained_parameters,
            self.precision,
            self.matmul_precision,
            str(self.device),
            self.seat.ranks,
            self.forest,
            self.vocabulary,
            self.step,
        )

    def close(self) -> None:
        """Let go of everything large, and of the other ranks."""
        if self.sender is not None:
            self.sender.close()
        self.optimizer = self.reference = self.sender = None
        self.scorer = Scorer(nn.Identity(), None)
        if self.ranks is not None:
            self.ranks.leave()

    # Parts

    def _scorer(self, *, train: bool) -> Scorer:
        """The model that this learner is about, or with ``train`` false its reference."""
        return build_scorer(
            self.config.model,
            self.precision,
            self.device,
            self.ranks,
            train=train,
            value_head=self.config.head == "value",
            seed=self.config.seed,
            compiled=self.config.learner.compile,
        )

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    @contextmanager
    def _seeded_dropout(self) -> Iterator[None]:
        """Dropout, where a model has it, is a function of the seed and the step, not of what ran before."""
        with torch.random.fork_rng() if self.dropout else nullcontext():
            if self.dropout:
                stage = [] if self.scorer.pipeline is None else [self.scorer.pipeline.own[0].index]
                torch.manual_seed(derive_seed("dropout", self.config.seed, self.seat.shard, self.step, *stage))
            yield


def _device(seat: Seat) -> torch.device:
    """A GPU of its own, where there are any; a cluster may have hidden the others' from this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", seat.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
