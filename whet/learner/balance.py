"""Even loads of experts without an auxiliary loss: after each step an expert's bias, which decides who is chosen but
not what a choice weighs, rises where the expert had fewer tokens than the mean and falls where it had more (Wang et
al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437). Biases are buffers: saved and published with the weights."""

from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.learner.model import LearnerModel
from whet.metrics import Metrics
from whet.models.moe.experts import experts_of
from whet.parallel.mesh import Ranks

BIAS = "e_score_correction_bias"
"""What transformers calls it, in all families that have it."""


def balanced(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Return the biases [E] that follow on a step in which experts got ``loads`` [E] tokens."""
    loads = loads.double()
    return bias + rate * torch.sign(loads.mean() - loads).to(bias.dtype)


class Balance:
    """Counts the tokens of each expert in the micro-batches that are learned from, each once, on all ranks together."""

    def __init__(self, model: LearnerModel, rate: float, ranks: Ranks | None) -> None:
        """With a ``rate`` of 0 nothing changes. Raises ``WhetError`` where there are no experts, or no biases."""
        self._rate, self._ranks = rate, ranks
        self._biases: dict[str, Tensor] = {}
        self._loads: dict[str, Tensor] = {}
        self._counting = False
        experts = dict(experts_of(model.model))
        for name, module in experts.items():
            block = name.replace(".base_layer", "").rpartition(".")[0]
            found = [b for key, b in model.model.get_submodule(block).named_buffers() if key.endswith(BIAS)]
            if rate and not found:
                raise WhetError(
                    f"learner.balance = {rate:g} moves the biases of routers, and {block} has none; set it to 0, which "
                    "only counts, or leave it out"
                )
            self._biases[name] = found[0] if found else torch.empty(0)
            count = next(module.parameters()).shape[0]
            self._loads[name] = torch.zeros(count, dtype=torch.int64, device=model.device)
            module.register_forward_pre_hook(self._count_for(name))
        if not any(experts if ranks is None else ranks.all(bool(experts))):
            raise WhetError("learner.balance is about experts, and this model has none; leave it out")
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def reset(self) -> None:
        """Forget what was counted."""
        for loads in self._loads.values():
            loads.zero_()

    @torch.no_grad()
    def step(self) -> Metrics:
        """Move the biases by what was counted since ``reset``; all ranks call it together. Reports how many times the
        mean the most loaded expert of a layer got."""
        totals = {name: loads.cpu() for name, loads in self._loads.items()}
        if self._ranks is not None:
            of_ranks = self._ranks.all(totals)
            totals = {}
            for one in of_ranks:
                totals |= {name: totals.get(name, 0) + loads for name, loads in one.items()}
        metrics = Metrics()
        for name, loads in totals.items():
            worst = float(loads.max() / loads.double().mean().clamp(min=1e-9))
            metrics.mean("experts/max_load", worst).max("experts/max_load_of_layers", worst)
            if self._rate and name in self._biases:
                bias = self._biases[name]
                bias.copy_(balanced(bias, loads.to(bias.device), self._rate))
        return metrics

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Count from here on, but not where nothing is learned: in scoring, or with tokens that only keep a rank busy.
        What is computed again in the backward pass comes after ``_end``."""
        self._counting = torch.is_grad_enabled() and bool(args[0].trained.any())

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._counting = False

    def _count_for(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._counting:
                chosen = args[1].flatten()
                self._loads[name].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))

        return count
