"""One rank of a learner: a model, its optimizer, and what they do with micro-batches. Scores, updates, saves, loads,
and hands out weights. Knows losses only as functions of a model's output and a batch.

There is one rank today. More ranks slot in where the model is built (sharding), where gradients get their norm, and
where ranks agree that a step is finite.
"""

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.batch import Batch, ModelOutput
from whet.cluster.base import Seat
from whet.config import Config
from whet.errors import WhetError
from whet.learner import precision
from whet.learner.base import Top
from whet.learner.config import LearnerConfig, OptimizerConfig
from whet.learner.dump import first_not_finite, read_dump, write_dump
from whet.learner.forward import forward, likeliest
from whet.learner.named_weights import named_weights
from whet.learner.optimizer import build_adamw, gradient_norm, learning_rate, scale_gradients
from whet.learner.state import changing, load_state, save_state
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.models.forest_attention import supports_forest
from whet.models.loading import load_model
from whet.models.values import ValueHead
from whet.packing import MicroBatch
from whet.seeds import derive_seed

COLUMNS = {
    "language": frozenset({"logprobs", "entropy", "topk", "reference_logprobs", "teacher_ids", "teacher_logprobs"}),
    "value": frozenset({"values"}),
}
"""What ``score`` can be asked for, by head."""


class WorkerConfig(Config):
    """Everything that one worker of a learner is built from."""

    model: ModelConfig
    learner: LearnerConfig = LearnerConfig()
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen and only scores."""
    head: Literal["language", "value"] = "language"
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


class LearnerWorker:
    """A model that scores and, with an optimizer, learns."""

    def __init__(self, config: WorkerConfig, seat: Seat | None = None) -> None:
        seat = seat or Seat()
        if seat.ranks > 1:
            raise WhetError(f"a learner of {seat.ranks} ranks was asked for, but only one rank is supported yet")
        self.config, self.seat = config, seat
        self.precision = config.learner.precision
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.trains = config.optimizer is not None
        self.model: nn.Module = self._load(train=self.trains)
        hf: Any = self.model.config
        text = hf.get_text_config()
        self.forest = supports_forest(hf)
        self.vocabulary = int(text.vocab_size)
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        self.matmul_precision = precision.choose_matmul_precision(
            config.learner.matmul_precision, self.precision, self.device, text.hidden_size, int(inner)
        )
        torch.set_float32_matmul_precision(self.matmul_precision)
        self.value_head = self._value_head(text.hidden_size) if config.head == "value" else None
        if config.learner.activation_checkpointing and self.trains:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.dropout = bool(getattr(text, "attention_dropout", 0.0)) or any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules()
        )
        self.reference: nn.Module | None = None  # loaded when first asked for
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
        of_top = {"teacher_ids", "teacher_logprobs"}
        if columns & of_top and top is None:
            raise WhetError("a teacher's likeliest tokens were asked for, but not how many; give top")
        self.model.eval()
        results = []
        for micro in micro_batches:
            batch = micro.batch.to(self.device)
            found: dict[str, Tensor] = {}
            own = columns - {"reference_logprobs"} - of_top
            if own:
                output = self._forward(self.model, batch, own)
                found |= {name: getattr(output, name).cpu() for name in own}
            if "reference_logprobs" in columns:
                found["reference_logprobs"] = self._reference_logprobs(batch).cpu()
            if top is not None and columns & of_top:
                with precision.autocast(self.precision, self.device):
                    ids, logprobs = likeliest(self.model, batch, top)
                found |= {"teacher_ids": ids.cpu(), "teacher_logprobs": logprobs.cpu()}
            results.append(found)
        return results

    def _forward(self, model: nn.Module, batch: Batch, needs: Set[str]) -> ModelOutput:
        with precision.autocast(self.precision, self.device):
            return forward(model, batch, needs, self.value_head)

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs under the weights that the run started from."""
        model: Any = self.model
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                return self._forward(model, batch, set()).logprobs
        if not self.trains:
            return self._forward(model, batch, set()).logprobs
        if self.reference is None:
            self.reference = self._load(train=False)
        return self._forward(self.reference, batch, set()).logprobs

    def release_reference(self) -> None:
        """Let go of the reference model; it is loaded again when asked for."""
        self.reference = None

    # Learning

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> RankUpdate:
        """Forward and backward over the micro-batches, then one optimizer step.

        Where the loss or the gradient's norm is not finite, nothing changes: not the weights, not the moments, not the
        schedule. The micro-batches are dumped; ``max_skipped_steps`` of that in a row raise ``WhetError``.
        """
        config = self.config.optimizer
        if self.optimizer is None or config is None:
            raise WhetError("this learner has no optimizer, so it can score but not update")
        total, metrics, logprobs = self.accumulate(micro_batches, loss)
        norm = gradient_norm(self._parameters())
        loss_value, norm_value = torch.stack([total.double(), norm.double()]).tolist()
        lr = learning_rate(config, self.step, self.config.steps)
        finite = self._all_ranks_agree(math.isfinite(loss_value) and math.isfinite(norm_value))
        if finite:
            if norm_value > config.max_grad_norm:
                scale_gradients(self._parameters(), config.max_grad_norm / (norm_value + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self._skip(micro_batches, loss, loss_value, norm_value)
        self.optimizer.zero_grad(set_to_none=True)  # generation between two updates gets the memory
        return RankUpdate(loss_value, metrics, logprobs, norm_value, lr, skipped=not finite)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> tuple[Tensor, Metrics, list[Tensor]]:
        """Fresh gradients, summed over the micro-batches: (loss [], the loss's metrics, log-probs of each, [n])."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        total, metrics, logprobs = torch.zeros((), dtype=torch.float64, device=self.device), Metrics(), []
        with self._seeded_dropout():
            for micro in micro_batches:
                batch = micro.batch.to(self.device)
                output = self._forward(self.model, batch, loss.needs)
                value, reported = loss(output, batch)
                value.backward()
                total += value.detach()
                metrics.merge(reported)
                logprobs.append(output.logprobs.detach().float().cpu())
        return total, metrics, logprobs

    def replay(self, dump: Path, loss: Loss) -> list[dict[str, Any]]:
        """What each micro-batch of a dump does to the weights as they are now, without changing them: ``loss``,
        ``gradient_norm``, and ``not_finite``, the first parameter whose gradient is not finite (or None)."""
        results = []
        for micro in read_dump(dump)[0]:
            total, _, _ = self.accumulate([micro], loss)
            gradients = [(name, parameter.grad) for name, parameter in self._named_parameters()]
            results.append(
                {
                    "loss": float(total),
                    "gradient_norm": float(gradient_norm(self._parameters())),
                    "not_finite": first_not_finite(gradients),
                }
            )
        return results

    def _skip(self, micro_batches: Sequence[MicroBatch], loss: Loss, value: float, norm: float) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        what = f"the loss ({value})" if not math.isfinite(value) else f"the norm of the gradient ({norm})"
        where = "set a folder for dumps to keep its batch"
        if self.config.dumps is not None:
            facts = {
                "what": f"{what} is not finite",
                "step": self.step,
                "loss": str(value),
                "gradient_norm": str(norm),
                "not_finite": first_not_finite([(name, p.grad) for name, p in self._named_parameters()]),
                "settings": repr(loss),
            }
            folder = self.config.dumps / f"step-{self.step:06d}-{self.skipped:03d}"
            where = f"its batch is in {write_dump(folder, micro_batches, facts)}"
        if self.skipped_in_a_row >= self.config.learner.max_skipped_steps:
            raise WhetError(
                f"{what} was not finite in {self.skipped_in_a_row} optimizer steps in a row, the last one being step "
                f"{self.step}; {where}. Lower optimizer.lr, or look at that batch with LearnerWorker.replay"
            )

    def _all_ranks_agree(self, finite: bool) -> bool:
        return finite

    # Weights and state

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``whet.learner.named_weights``. The value head is not among them."""
        return named_weights(self.model)

    def collect_weights(self) -> list[tuple[str, Tensor]]:
        """``named_weights`` at once. The tensors are the model's own where they need no merging."""
        return list(self.named_weights())

    def save(self, folder: Path) -> None:
        """Into an existing folder."""
        facts = {
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "matmul_precision": self.matmul_precision,
        }
        save_state(folder, self._changing(), self.optimizer, facts)

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called; a precision of products that was chosen by measuring comes along."""
        facts = load_state(folder, self._changing(), self.optimizer)
        self.step, self.skipped = facts["step"], facts["skipped"]
        self.skipped_in_a_row = facts["skipped_in_a_row"]
        if self.config.learner.matmul_precision == "auto":
            self.matmul_precision = facts["matmul_precision"]
            torch.set_float32_matmul_precision(self.matmul_precision)

    def describe(self) -> dict[str, Any]:
        """Facts for people."""
        parameters = list(self._parameters())
        return {
            "model": self.config.model.path,
            "head": self.config.head,
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "precision": self.precision,
            "matmul_precision": self.matmul_precision,
            "device": str(self.device),
            "forest": self.forest,
            "vocabulary": self.vocabulary,
            "steps_done": self.step,
        }

    def close(self) -> None:
        """Let go of everything large."""
        self.optimizer = self.reference = self.value_head = None
        self.model = nn.Identity()

    # Parts

    def _load(self, *, train: bool) -> nn.Module:
        dtype = precision.weight_dtype(self.precision)
        model = load_model(self.config.model, dtype=dtype, train=train, seed=self.config.seed)
        if not train:
            precision.shrink(model, self.precision)
        return model.to(self.device)

    def _value_head(self, width: int) -> ValueHead:
        head = ValueHead(width, seed=self.config.seed, device=self.device)
        output: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        if output.weight is not self.model.get_input_embeddings().weight:  # type: ignore[operator]
            output.requires_grad_(False)  # nobody reads its logits
        return head.to(precision.weight_dtype(self.precision)).requires_grad_(self.trains)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        if self.value_head is not None:
            yield from self.value_head.named_parameters(prefix="value_head")

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named_parameters()]

    def _changing(self) -> dict[str, Tensor]:
        return changing({"": self.model, "value_head.": self.value_head})

    @contextmanager
    def _seeded_dropout(self) -> Iterator[None]:
        """Dropout, where a model has it, is a function of the seed and the step, not of what ran before."""
        with torch.random.fork_rng() if self.dropout else nullcontext():
            if self.dropout:
                torch.manual_seed(derive_seed("dropout", self.config.seed, self.seat.rank, self.step))
            yield
