"""Router replay (R3, arXiv 2510.11370): the choices of a mixture's routers are recorded in a generator and given to a
learner, whose routers weight the given experts by their own scores. So a rounding error that changes a router's choice
doesn't make the learner's model differ from the generator's. Implemented by hooks, without a fork of modelling code."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.core.expert_ids import Ids
from whet.models.attention.forest import decoder_of
from whet.models.stages import layers_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEYWORD = "whet_experts"
"""The keyword under which a decoder and each of its layers get ids, [n, layers with experts, k]."""


def _qwen3_moe(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    scores = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, chosen)
    if router.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores.to(logits.dtype)


def _mixtral(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    scores = torch.softmax(logits.float(), dim=-1).gather(1, chosen)
    return scores / scores.sum(dim=-1, keepdim=True)


def _deepseek_v3(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    scores = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


_WEIGHTS: dict[str, tuple[str, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", _qwen3_moe),
    "mixtral": ("MixtralTopKRouter", _mixtral),
    "deepseek_v3": ("DeepseekV3TopkRouter", _deepseek_v3),
}
"""By type of model: its router, and the function of its forward pass that computes the weights [n, k] of given
experts."""

_BY_ROUTER = dict(_WEIGHTS.values())


def cannot_replay(config: "PretrainedConfig") -> str | None:
    """Return why choices of such a model's routers can't be replayed, or None."""
    kind = config.get_text_config().model_type
    if kind in _WEIGHTS:
        return None
    supported = ", ".join(sorted(_WEIGHTS))
    return f"rollouts.router_replay is for experts of {supported}, but this model is a {kind}; leave it out"


COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""The settings by which families say how many experts a layer has."""


def has_experts(config: "PretrainedConfig") -> bool:
    """Return whether the model is a mixture of experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in COUNTS)


def experts_missing(config: "PretrainedConfig", replay: bool, balance: bool) -> str | None:
    """Return why a model doesn't support the expert settings of a recipe, or None."""
    if replay and (why := cannot_replay(config)) is not None:
        return why
    if balance and not has_experts(config):
        kind = config.get_text_config().model_type
        return f"learner.balance is for experts, but this model, a {kind}, has none; leave it out"
    return None


def _routers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if type(part).__name__ in _BY_ROUTER]


class RouteRecorder:
    """Records the choices of a model's routers."""

    def __init__(self, model: nn.Module) -> None:
        self._chosen: list[Tensor] = []
        for router in _routers(model):
            router.register_forward_hook(lambda _, args, output: self._chosen.append(output[2]))

    def take(self) -> Ids:
        """Return the choices of the forward pass since the last call, [n, layers, k]."""
        chosen, self._chosen[:] = torch.stack(self._chosen, dim=1), []
        return chosen.to("cpu", torch.int16).numpy()


def follow_routes(model: nn.Module) -> None:
    """Make each router use the experts that its layer gets as ``KEYWORD``, and its own choice if there are none or -1.
    Layers get them by keyword, so that activation checkpointing passes them again."""
    number = 0
    for layer in layers_of(decoder_of(model))[1]:
        for router in _routers(layer):
            given = _Given(number)
            layer.register_forward_pre_hook(given.take, with_kwargs=True)
            router.register_forward_hook(partial(given.choose, _BY_ROUTER[type(router).__name__]))
            number += 1


class _Given:
    """The experts that one router has to use, from the call of its layer on."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._ids: Tensor | None = None

    def take(self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get(KEYWORD)
        self._ids = None if ids is None else ids[:, self._number].long()

    def choose(self, weights: Any, router: nn.Module, args: tuple[object, ...], output: tuple[Tensor, ...]) -> object:
        if self._ids is None:
            return output
        logits, _, choice = output
        chosen = torch.where(self._ids < 0, choice, self._ids)
        return logits, weights(router, logits, chosen), chosen
