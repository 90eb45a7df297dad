"""A model whose layers are compiled says and learns the same."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.groups import group
from tests.tiny import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.core.batch import Batch
from whet.learner.precision import bf16_residual_stream
from whet.models.attention.forest import forest_hidden, use_forest_attention
from whet.models.compiled import compile_layers

CPU = torch.device("cpu")


def learned(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Hidden states and gradients."""
    model.zero_grad()
    hidden = forest_hidden(model, batch)
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    (hidden * pull).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **gradients}


@pytest.mark.slow
def test_hidden_states_and_gradients_are_the_same_for_batches_of_any_size() -> None:
    from torch._dynamo.utils import counters

    plain = tiny_qwen3().double().train()
    use_forest_attention(plain)
    compiled = copy.deepcopy(plain)
    assert compile_layers(compiled, CPU) == len(plain.model.layers)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    torch.compiler.reset()
    counters.clear()
    for size in (2, 3, 5, 4, 6, 7, 8):
        if size > 6:
            compiled.gradient_checkpointing_enable({"use_reentrant": False})
        batch = Batch.from_groups([group(f"g{i}", [3, 4, 5 + i], [[7] * size, [8, 9]]) for i in range(size)])
        expected, found = learned(plain, batch), learned(compiled, batch)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            # transformers computes norms in float32, whatever the model is in
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 4, "of all layers and sizes, also recomputed"
    assert all("function forest_attention" in reason for reason in counters["graph_break"])


def test_what_differs_too_much_from_batch_to_batch_is_left_alone() -> None:
    """The first layer is without experts."""
    model = tiny_qwen3_moe()
    assert compile_layers(model, CPU) == 4
    compiled = [
        [name for name, part in layer.named_modules() if "forward" in vars(part)] for layer in model.model.layers
    ]
    assert compiled == [[""], ["self_attn", "input_layernorm", "post_attention_layernorm"]]


@pytest.mark.slow
def test_compiled_layers_with_a_narrow_stream_are_those_that_are_not_compiled_within_rounding() -> None:
    plain = tiny_qwen3().train()
    use_forest_attention(plain)
    bf16_residual_stream(plain)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, CPU)
    batch = Batch.from_groups([group(f"g{i}", [3, 4, 5 + i], [[7] * 4, [8, 9]]) for i in range(3)])
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = learned(plain, batch), learned(compiled, batch)
    assert found["hidden"].dtype == torch.bfloat16
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm() / tensor.norm()) < 0.05, name


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler here, and no-such-compiler was not found"):
        compile_layers(tiny_llama(), CPU)


@pytest.mark.parametrize("key", ["tensor", "expert"])
def test_layers_that_are_cut_are_refused_with_the_recipe(tmp_path: Path, key: str) -> None:
    changes = {"cluster": {"type": "processes"}, "learner": {"compile": True}, "parallel": {"fsdp": 2, key: 2}}
    with pytest.raises(ConfigError, match=rf"learner\.compile = true .*parallel\.{key} = 2 splits them"):
        toy_recipe(tmp_path, **changes)


def test_a_model_without_plain_layers_is_refused() -> None:
    model = tiny_llama()
    model.model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"has nothing to compile in LlamaForCausalLM"):
        compile_layers(model, CPU)
