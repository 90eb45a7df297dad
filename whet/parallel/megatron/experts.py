"""A mixture of experts: Megatron Core's layer, with its exchange of tokens by all-to-all and its shared expert, and two
other parts: the router of the Hugging Face model, and experts that are computed together, as in the torch learner.
Megatron Core computes experts together only with Transformer Engine or grouped_gemm, which need a GPU.

No auxiliary loss is added: losses here are functions of a model's output.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from whet.models.moe.routing import COUNTS
from whet.parallel.megatron.layers import feed_forward
from whet.parallel.megatron.stand_ins import Group
from whet.parallel.mesh import Ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Router(nn.Module):
    """Chooses experts by the router of the Hugging Face model, with its rounding and its biases."""

    def __init__(self, here: nn.Module) -> None:
        super().__init__()
        self.here = here

    def set_layer_number(self, _: int) -> None:
        """Do nothing: the number is for Megatron Core's auxiliary losses."""

    def forward(self, hidden: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[n, 1, H] -> weights and choices, [n, experts]"""
        logits, scores, chosen = self.here(hidden)
        weights = torch.zeros_like(logits, dtype=scores.dtype).scatter(1, chosen, scores)
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class Experts(nn.Module):
    """The experts on this rank, in the module that the Hugging Face model has."""

    def __init__(
        self,
        count: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        hf: "PretrainedConfig",
        kind: type,
    ) -> None:
        super().__init__()
        shrunk = copy.deepcopy(hf)
        for name in COUNTS:
            if hasattr(hf, name):
                setattr(shrunk, name, count)
        self.here = kind(shrunk).to(config.params_dtype)
        self.count = count

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """hidden: [n, H], sorted by expert; tokens_per_expert: [experts]; weights: [n] -> [n, H]"""
        numbers = torch.arange(self.count, device=hidden.device)
        expert = numbers.repeat_interleave(tokens_per_expert.to(hidden.device))
        return self.here(hidden, expert[:, None], weights[:, None]), None


def mixture(hf: "PretrainedConfig", block: nn.Module) -> ModuleSpec:
    """Return the specification of a layer of experts; ``block`` is the Hugging Face model's, whose router is moved into
    the layer."""
    plain: Any = block

    def router(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> Router:
        return Router(plain.gate)

    experts = ModuleSpec(Experts, {"hf": hf, "kind": type(plain.experts)})
    shared = ModuleSpec(SharedExpertMLP, submodules=feed_forward()) if hasattr(plain, "shared_experts") else None
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts, shared, router))


def expert_groups(ranks: Ranks | None, single: Group) -> dict[str, Group]:
    """Return the groups of ranks by which Megatron Core's layer exchanges tokens. Its tensor parallelism cuts no
    expert: each of those ranks routes its own tokens."""
    split = single
    if ranks is not None and ranks.config.expert > 1:
        split = ranks.experts(ranks.config.expert).get_group("expert")
    alone = ("expt_tp", "expt_dp", "tp_cp", "tp_dp_cp")
    return {"ep": split, "tp_ep": split} | dict.fromkeys(alone, single)
