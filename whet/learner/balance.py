"""Load balancing of experts without an auxiliary loss: after each step an expert's bias, which affects which experts
are chosen but not their weights, rises if the expert had fewer tokens than the mean and falls if it had more (Wang et
al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437). Biases are buffers, saved and published with the weights."""

from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.forest import repeated, sequences_below
from whet.learner.model import LearnerModel
from whet.metrics import Metrics
from whet.models.device import placed
from whet.models.moe.experts import experts_of
from whet.models.shards import Tokens
from whet.parallel.mesh import Ranks

BIAS = "e_score_correction_bias"
"""The buffer's name in transformers, the same in all families that have it."""


def balanced(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Return the biases [E] after a step in which the experts got ``loads`` [E] tokens."""
    loads = loads.double()
    return bias + rate * torch.sign(loads.mean() - loads).to(bias.dtype)


class Balance:
    """Counts the tokens of each expert in the micro-batches that are trained on, over all ranks. A shared token counts
    once for each of its sequences, so that loads depend neither on what is shared nor on how a batch is cut."""

    def __init__(self, model: LearnerModel, rate: float, ranks: Ranks | None) -> None:
        """With a ``rate`` of 0 the loads are only counted. Raises ``WhetError`` if the model has no experts, or no
        biases."""
        self._rate, self._ranks = rate, ranks
        self._biases: dict[str, Tensor] = {}
        self._loads: dict[str, Tensor] = {}
        self._counting = False
        self._weights = torch.empty(0)  # of this rank's tokens in the pass
        experts = dict(experts_of(model.model))
        for name, module in experts.items():
            block = name.replace(".base_layer", "").rpartition(".")[0]
            biases = [b for key, b in model.model.get_submodule(block).named_buffers() if key.endswith(BIAS)]
            if rate and not biases:
                raise WhetError(
                    f"learner.balance = {rate:g} moves the biases of routers, but {block} has none; set it to 0, which "
                    "only counts, or leave it out"
                )
            self._biases[name] = biases[0] if biases else torch.empty(0)
            count = next(module.parameters()).shape[0]
            self._loads[name] = torch.zeros(count, dtype=torch.int64, device=model.device)
            module.register_forward_pre_hook(self._count_for(name))
        if not any(experts if ranks is None else ranks.all_gather(bool(experts))):
            raise WhetError("learner.balance is for experts, but this model has none; leave it out")
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def reset(self) -> None:
        """Set all counts to 0."""
        for loads in self._loads.values():
            loads.zero_()

    @torch.no_grad()
    def step(self) -> Metrics:
        """Move the biases by the counts since ``reset``; all ranks call this together. Report the load of each layer's
        most loaded expert, as a multiple of the mean."""
        totals = {name: loads.cpu() for name, loads in self._loads.items()}
        if self._ranks is not None:
            of_ranks = self._ranks.all_gather(totals)
            totals = {}
            for counts in of_ranks:
                totals |= {name: totals.get(name, 0) + loads for name, loads in counts.items()}
        metrics = Metrics()
        for name, loads in totals.items():
            worst = float(loads.max() / loads.double().mean().clamp(min=1e-9))
            metrics.mean("experts/max_load", worst).max("experts/max_load_of_layers", worst)
            if self._rate and name in self._biases:
                bias = self._biases[name]
                bias.copy_(balanced(bias, loads.to(bias.device), self._rate))
        return metrics

    def _begin(self, model: LearnerModel, args: tuple[Any, ...]) -> None:
        """Start counting, except in passes without training: scoring, or idle batches. Recomputation in the backward
        pass happens after ``_end``, so it isn't counted."""
        self._counting = torch.is_grad_enabled() and bool(args[0].trained.any())
        if self._counting:
            self._weights = placed(_weights(args[0], model.shards.tokens), model.device)

    def _end(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._counting = False

    def _count_for(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._counting:
                chosen = args[1]  # [n, k]
                weights = self._weights[:, None].expand_as(chosen)
                self._loads[name].scatter_add_(0, chosen.flatten(), weights.flatten())

        return count


def _weights(batch: Batch, tokens: Tokens) -> Tensor:
    """Return how many sequences have each token that this rank has between matrices; 0 for padding. [n] int64"""
    padded = tokens.padded(len(batch))
    weights = torch.zeros(padded, dtype=torch.int64)
    below = sequences_below(batch.segment_parent, batch.segment_sequence)
    weights[: len(batch)] = repeated(below, batch.segment_length.cpu(), len(batch))
    here = torch.cat([torch.arange(run.start, run.stop) for run in tokens.runs(padded)])
    return weights[here[tokens.between_matrices(len(here))]]
