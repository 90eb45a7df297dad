"""The same numbers for both libraries: one model, laid out packed for whet and padded for TRL.

Each token of a batch has a unique name, its index. ``Table`` is a model whose logits for a token are the row of
that name, so that a forward pass of either library's reads, and its gradient reaches, the same float64 parameters.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests.losses.batches import random_groups
from whet.core.batch import Batch, ModelOutput
from whet.core.types import Group, Weighting


class Table(nn.Module):
    """Answers as TRL's models do: at place j what it says about token j + 1; ``log_probs`` are 0 where not labelled."""

    def __init__(self, names: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows = nn.Parameter(torch.randn(names, names, generator=generator, dtype=torch.float64))

    def logprobs(self) -> Tensor:
        """Of each token under its own name. [names]"""
        return self.rows.log_softmax(-1).diagonal()

    def entropy(self) -> Tensor:
        """[names]"""
        logprobs = self.rows.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        following = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
        output = SimpleNamespace(logits=self.rows[following])
        if labels is not None:
            names = input_ids[:, 1:]
            output.log_probs = torch.where(labels[:, 1:] != -100, self.logprobs()[names], 0.0)
            output.entropy, output.mean_logits = self.entropy()[names], self.rows.mean(-1)[names]
            output.is_top1 = torch.zeros_like(names, dtype=torch.bool)
        return output


@dataclass
class Scene:
    batch: Batch  # for whet, columns filled; untrained places hold nan
    table: Table
    ids: Tensor  # [S, T] for TRL: each answer's own tokens by name, padded at the end
    real: Tensor  # [S, T] 1 where there is a token
    trained: Tensor  # [S, T] 1 where it is trained

    @property
    def output(self) -> ModelOutput:
        """Return the table's logits for packed tokens."""
        names = torch.arange(len(self.batch))
        return ModelOutput(self._trained(self.table.logprobs()[names]), self._trained(self.table.entropy()[names]))

    @property
    def padding(self) -> int:
        """The name that stands for the prompt and for padding."""
        return len(self.batch)

    def padded(self, column: Tensor) -> Tensor:
        """A column of the batch as TRL has it, 0 where untrained. [N] -> [S, T]"""
        return torch.where(self.trained.bool(), column[self.ids.clamp(max=len(column) - 1)], 0.0)

    def with_prompt(self, matrix: Tensor, value: int) -> Tensor:
        """[S, T] -> [S, 1 + T]"""
        return torch.cat([torch.full_like(matrix[:, :1], value), matrix], 1)

    def weigh(self, weighting: Weighting, divisor: int | None = None) -> "Scene":
        return replace(self, batch=self.batch.weigh(weighting, divisor))

    def _trained(self, column: Tensor) -> Tensor:
        return torch.where(self.batch.trained, column, torch.nan)


def scene(groups: list[Group], seed: int, noise: float = 0.3, names: int = 0) -> Scene:
    """``noise`` is how far the columns of log-probs lie from the table's; ``names`` are further names."""
    batch = Batch.from_groups(groups)
    count = len(batch)
    table = Table(count + 1 + names, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def near(column: Tensor, scale: float) -> Tensor:
        moved = column + scale * torch.randn(count, generator=generator, dtype=torch.float64)
        return moved.masked_fill(~batch.trained, torch.nan)

    now = table.logprobs().detach()[:count]
    old = near(now, noise)
    own = [(batch.sequence == s).nonzero().squeeze(1) for s in range(batch.sequences)]
    ids = nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=count)
    trained = torch.cat([batch.trained, torch.tensor([False])])
    advantages = torch.randn(batch.sequences, generator=generator, dtype=torch.float64)
    filled = replace(
        batch,
        old_logprobs=old,
        rollout_logprobs=near(old, noise),
        reference_logprobs=near(now, noise),
        token_advantages=batch.per_token(advantages),
    )
    return Scene(filled, table, ids, (ids < count).long(), trained[ids].long())


def sampled(seed: int, only_trained: bool = True) -> list[Group]:
    """Ragged answers, some of two turns; unless asked for, none that trains nothing: the libraries count those
    differently."""
    groups = random_groups(seed, (3, 2, 4, 3))
    for group in groups:
        group.episodes = [t for t in group.episodes if t.trained_tokens or not only_trained]
    return [group for group in groups if group.trajectories]


def trainer(kind: type, model: nn.Module, **attributes: Any) -> Any:
    """A TRL trainer with nothing but what the methods under test read."""
    made = kind.__new__(kind)
    model.eval()  # no accumulation over micro-batches
    made.__dict__.update(
        model=model,
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        is_encoder_decoder=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        **attributes,
    )
    return made


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    (found,) = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    return found


def same(ours: Tensor, theirs: Tensor, model: nn.Module, tolerance: float = 1e-10) -> None:
    """Loss and gradient agree, and the gradient isn't trivially 0."""
    torch.testing.assert_close(ours.squeeze(), theirs.squeeze().to(ours.dtype), rtol=tolerance, atol=tolerance)
    same_gradient(ours, theirs, model, tolerance)


def same_gradient(ours: Tensor, theirs: Tensor, model: nn.Module, tolerance: float = 1e-10) -> None:
    our, their = gradient(ours, model), gradient(theirs, model)
    assert our.abs().max() > 1e-4
    torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)
