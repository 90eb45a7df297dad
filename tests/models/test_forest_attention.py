"""Forest attention against separate runs of every path, in float64: hidden states and gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PretrainedConfig,
)

from tests.groups import episode
from tests.tiny import tiny_gemma, tiny_llama, tiny_qwen3
from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task
from whet.models.attention import dense as dense_attention
from whet.models.attention import layout
from whet.models.attention.dense import AttentionSettings
from whet.models.attention.dense import dense_attention as dense
from whet.models.attention.forest import decoder_of, forest_hidden, supports_forest, use_forest_attention
from whet.models.attention.layout import ForestLayout

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}


# transformers has these only with a softmax in float32; two layers enlarge that.
ROUNDING = {"gemma2": 1e-5, "gpt_oss": 1e-5}


def tiny_gemma2() -> nn.Module:
    """Soft caps in attention and head, a window, and a special scaling."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_logit_softcapping=0.5, query_pre_attn_scalar=5))


def tiny_gpt_oss() -> nn.Module:
    """Attention sinks and experts."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2))
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    builders = {
        "llama": tiny_llama,
        "qwen3": tiny_qwen3,
        "gemma3": tiny_gemma,
        "gemma2": tiny_gemma2,
        "gpt_oss": tiny_gpt_oss,
    }
    model = builders[kind]().double().eval()
    model.set_attn_implementation("eager" if kind in ROUNDING else "sdpa")
    model.set_experts_implementation("eager")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm_in_float64, module)
    return model


def norm_in_float64(module: Any, x: Tensor) -> Tensor:
    """transformers' norms round to float32, which would hide or make differences of that size."""
    weight = 1.0 + module.weight if "Gemma" in type(module).__name__ else module.weight
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def forest(parents: list[int], lengths: list[int], seed: int = 0) -> tuple[Batch, list[list[int]]]:
    """A batch of the given segments and, for each, the tokens' places along its path from the root."""
    paths: list[list[int]] = []
    start = 0
    for parent, length in zip(parents, lengths, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, start + length)])
        start += length
    none = torch.zeros(0, dtype=torch.long)
    batch = Batch(
        tokens=torch.randint(0, 256, (start,), generator=torch.Generator().manual_seed(seed)),
        trained=torch.zeros(start, dtype=torch.bool),
        segment_start=torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]),
        segment_parent=torch.tensor(parents),
        segment_position=torch.tensor([len(path) - length for path, length in zip(paths, lengths, strict=True)]),
        segment_sequence=torch.full((len(parents),), -1),
        group=none,
        episode=none,
        reward=none.double(),
        truncated=none.bool(),
    )
    return batch, paths


def separately(model: nn.Module, batch: Batch, paths: list[list[int]]) -> Tensor:
    """Every path run alone by the model's own attention; each segment's states are taken from its own path."""
    ends = [*batch.segment_start.tolist()[1:], len(batch)]
    pieces = []
    for path, begin, end in zip(paths, batch.segment_start.tolist(), ends, strict=True):
        states = decoder_of(model)(input_ids=batch.tokens[path][None], use_cache=False).last_hidden_state[0]
        pieces.append(states[len(path) - (end - begin) :])
    return torch.cat(pieces)


def states_and_gradients(model: nn.Module, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=hidden.dtype)
    model.zero_grad()
    (hidden * pull).sum().backward()
    return hidden.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_forest_is_exact(model: nn.Module, batch: Batch, paths: list[list[int]], tolerance: float = 1e-9) -> None:
    expected = states_and_gradients(model, separately(model, batch, paths))
    use_forest_attention(model)
    torch.testing.assert_close(
        states_and_gradients(model, forest_hidden(model, batch)), expected, atol=tolerance, rtol=tolerance
    )


DEEP = [-1, 0, 0, 1, 1, 3, -1, 6, 6, 6, -1]
LENGTHS = [11, 4, 9, 1, 6, 3, 7, 12, 12, 12, 2]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "gpt_oss"])
def test_a_deep_forest_equals_separate_runs_in_states_and_gradients(kind: str) -> None:
    batch, paths = forest(DEEP, LENGTHS)
    assert_forest_is_exact(build(kind), batch, paths, ROUNDING.get(kind, 1e-9))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_result_does_not_depend_on_how_segments_are_put_into_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, paths = forest(DEEP, LENGTHS)
    monkeypatch.setattr(layout, "_SLACK", 0)
    monkeypatch.setattr(layout, "_PADDING", 1.0)
    assert_forest_is_exact(build(kind), batch, paths)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 14)), min_size=1, max_size=9), st.booleans())
def test_any_forest_equals_separate_runs(segments: list[tuple[int, int]], window: bool) -> None:
    parents = [min(choice, index) - 1 for index, (choice, _) in enumerate(segments)]
    batch, paths = forest(parents, [length for _, length in segments])
    assert_forest_is_exact(build("gemma3" if window else "llama"), batch, paths)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_attention_has_the_gradients_that_numbers_say(
    softcap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_attention, "_SCORES", 1)
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    query, key, value = random(2, 3, 4, 5), random(2, 4, 2, 5), random(2, 4, 2, 6)
    sinks = random(4) if with_sinks else None
    mask = torch.zeros(2, 1, 3, 4, dtype=torch.float64)
    mask[0, 0, 0, 2:] = mask[1, 0, 1, :3] = float("-inf")

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return dense(query, key, value, mask, AttentionSettings(0.7, softcap=softcap, sinks=sinks))

    assert torch.autograd.gradcheck(attend, (query, key, value, sinks))


def test_bfloat16_autocast_agrees_with_float32_within_rounding() -> None:
    batch, _ = forest(DEEP, LENGTHS)
    model = build("llama").float()
    use_forest_attention(model)
    exact = forest_hidden(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = forest_hidden(model, batch)
    assert 0 < (rounded - exact).abs().mean() < 0.02


@pytest.mark.parametrize(("precision", "rounding"), [("highest", 1e-4), ("medium", 0.02)])
def test_float32_agrees_with_float64_whichever_library_multiplies(precision: str, rounding: float) -> None:
    """A processor may round to bfloat16 in ``medium``."""
    batch, _ = forest(DEEP, LENGTHS)
    exact, narrow = build("llama"), build("llama").float()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert dense_attention.uses_onednn(torch.zeros(1)) == (precision == "medium")
        for model in (exact, narrow):
            use_forest_attention(model)
            forest_hidden(model, batch).square().sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    for (name, ours), theirs in zip(narrow.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            assert (ours.grad - theirs.grad).norm() < rounding * theirs.grad.norm(), name


def test_a_batch_of_groups_gives_what_its_rows_give_unshared() -> None:
    prompts = [list(range(1, 20)), list(range(40, 45))]
    groups = [
        Group(str(i), Task(str(i), []), [episode([Span(p, False), Span([7 * i + j, 3, 9], True)]) for j in range(4)])
        for i, p in enumerate(prompts)
    ]
    shared, unshared = Batch.from_groups(groups), Batch.from_groups(groups, share_prompts=False)
    model = build("llama")
    use_forest_attention(model)
    ours, theirs = forest_hidden(model, shared), forest_hidden(model, unshared)
    torch.testing.assert_close(ours[shared.trained], theirs[unshared.trained], atol=1e-10, rtol=1e-10)
    assert len(shared) < len(unshared)


def test_sixty_four_short_answers_make_few_blocks() -> None:
    lengths = [60] * 8 + [48 + i % 32 for i in range(64)]
    batch, _ = forest([-1] * 8 + [i // 8 for i in range(64)], lengths)
    layout = ForestLayout.of(batch, "cpu")
    assert len(layout.blocks) <= 4
    needed = sum((60 if i >= 8 else 0) + length for i, length in enumerate(lengths))
    assert sum(block.rows * block.keys for block in layout.blocks) < 1.3 * needed


def test_a_recurrent_model_is_run_on_padded_rows_and_refuses_shared_prompts() -> None:
    config = MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, state_size=4)
    assert not supports_forest(config)
    torch.manual_seed(0)
    model = MambaForCausalLM(config).eval()
    batch, paths = forest([-1, -1, -1], [5, 9, 1])
    torch.testing.assert_close(forest_hidden(model, batch), separately(model, batch, paths), atol=1e-5, rtol=1e-5)
    with pytest.raises(WhetError, match="share_prompts=False"):
        forest_hidden(model, forest([-1, 0], [5, 9])[0])
    with pytest.raises(WhetError, match="share_prompts=False"):
        use_forest_attention(model)


@pytest.mark.parametrize(
    "changes", [{"layer_types": ["linear_attention", "full_attention"]}, {"layer_types": ["chunked_attention"] * 2}]
)
def test_layers_that_are_not_plain_attention_are_not_given_forests(changes: dict[str, Any]) -> None:
    config: PretrainedConfig = build("qwen3").config
    assert supports_forest(config)
    config.layer_types = changes["layer_types"]
    assert not supports_forest(config)


def test_a_call_without_a_layout_is_refused() -> None:
    model = build("llama")
    use_forest_attention(model)
    with pytest.raises(WhetError, match="forest_hidden"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
