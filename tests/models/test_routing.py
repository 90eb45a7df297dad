"""Routers that get the experts to use: against the families' own code, with gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.groups import group
from tests.tiny import tiny_deepseek, tiny_llama, tiny_mixtral, tiny_qwen3_moe
from whet.core.batch import Batch
from whet.models.attention.forest import forest_hidden, use_forest_attention
from whet.models.moe.experts import use_grouped_experts
from whet.models.moe.routing import RouteRecorder, cannot_replay, follow_routes

FAMILIES = [tiny_qwen3_moe, tiny_mixtral, tiny_deepseek]
VOCABULARY = 32


def build(family: Callable[..., PreTrainedModel], dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = family(VOCABULARY, dtype=dtype, initializer_range=0.3)
    use_grouped_experts(model)
    use_forest_attention(model)
    return model


def batch(experts: Tensor | None = None) -> Batch:
    made = Batch.from_groups([group("a", [3, 4, 5, 6], [[9, 8], [13, 12, 11, 10]]), group("b", [1, 2], [[7]])])
    return replace(made, experts=experts)


def gradients(model: PreTrainedModel, hidden: Tensor) -> list[Tensor]:
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def chosen(model: PreTrainedModel) -> Tensor:
    recorder = RouteRecorder(model)
    forest_hidden(model, batch())
    return torch.from_numpy(recorder.take())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_choice_given_back_changes_no_bit(family: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    model = build(family, dtype)
    expected = forest_hidden(model, batch())
    ids = chosen(model)
    assert ids.dtype == torch.int16
    assert ids.shape == (len(batch()), 2 if family is tiny_mixtral else 1, 2)
    follow_routes(model)
    assert torch.equal(forest_hidden(model, batch(ids)), expected)
    assert torch.equal(forest_hidden(model, batch()), expected), "what was given is not remembered"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_given_is_taken_and_weighed_as_if_no_other_expert_had_been_there(
    family: Callable[..., PreTrainedModel],
) -> None:
    model, oracle = build(family), build(family)
    ids = (chosen(model) + 1) % 4
    ids[1::3] = -1
    follow_routes(model)
    found = forest_hidden(model, batch(ids))
    for number, router in enumerate(m for m in oracle.modules() if type(m).__name__.lower().endswith("topkrouter")):
        router.register_forward_hook(by_hand(ids[:, number].long()))
    expected = forest_hidden(oracle, batch())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # routers compute in float32
    assert not torch.equal(found, forest_hidden(model, batch()))
    for one, other in zip(gradients(model, found), gradients(oracle, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def by_hand(ids: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Token by token, expert by expert, by the families' papers."""

    def hook(router: object, args: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = output
        rows, picked = [], own.clone()
        for token, wanted in enumerate(ids):
            if wanted[0] < 0:
                rows.append(weights[token])
                continue
            picked[token] = wanted
            if type(router).__name__.startswith("Deepseek"):
                scores = [1 / (1 + torch.exp(-logits[token, i])) for i in wanted]
                total = sum(scores) if router.norm_topk_prob else 1.0
                rows.append(torch.stack(scores) / total * router.routed_scaling_factor)
            else:  # a softmax over the chosen logits is the softmax over all, normalised
                rows.append(torch.softmax(logits[token, wanted].float(), dim=0).to(weights.dtype))
        return logits, torch.stack(rows).to(weights.dtype), picked

    return hook


def test_qwen3_without_normalisation_weighs_by_the_softmax_over_all_experts() -> None:
    model = tiny_qwen3_moe(VOCABULARY, norm_topk_prob=False, initializer_range=0.3)
    use_grouped_experts(model)
    use_forest_attention(model)
    follow_routes(model)
    weights: list[Tensor] = []
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda _, args, output: weights.append(output[:2]))
    ids = torch.zeros(len(batch()), 1, 2, dtype=torch.int16)
    ids[..., 1] = 3
    forest_hidden(model, batch(ids))
    ((logits, found),) = weights
    torch.testing.assert_close(found, torch.softmax(logits, dim=-1)[:, [0, 3]])


@pytest.mark.parametrize("family", [tiny_qwen3_moe, tiny_mixtral])
def test_activation_checkpointing_replays_in_the_backward_pass_too(family: Callable[..., PreTrainedModel]) -> None:
    model = build(family).train()
    ids = (chosen(model) + 1) % 4
    follow_routes(model)
    expected = gradients(model, forest_hidden(model, batch(ids)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden = forest_hidden(model, batch(ids))
    forest_hidden(model, batch())  # another micro-batch in between
    for one, other in zip(gradients(model, hidden), expected, strict=True):
        assert torch.equal(one, other)


def test_other_models_are_named_with_those_that_can() -> None:
    assert cannot_replay(tiny_qwen3_moe().config) is None
    assert "mixtral" in (cannot_replay(tiny_llama().config) or "")
