"""LoRA on a model in 4 bits: a learner computes what it would with ordinary weights of the same values, sends these to
a generator, and saves only what it trains. Runs wherever bitsandbytes is installed."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import grid
from tests.learner.parts import (
    PolicyGradient,
    assert_close,
    assert_same,
    cut,
    gradients,
    published,
    save_model,
    some_batch,
    weights,
    whole,
    worker,
)
from tests.tiny import tiny_llama, tiny_mixtral, tiny_qwen3
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, WhetError
from whet.base.files import load_tensors
from whet.learner.worker import LearnerWorker
from whet.models.config import LoraSettings, ModelConfig
from whet.models.loading import fingerprint, load_model
from whet.models.quantized import BLOCK, dequantize, quantized_layers
from whet.weights.named_weights import ModelWeights

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'whet[qlora]'")
PLAIN = LoraSettings(rank=4, alpha=6.0)
NF4 = LoraSettings(rank=4, alpha=6.0, quantize="nf4")
DORA = LoraSettings(rank=4, alpha=6.0, quantize="nf4", dora=True)
# The 16 levels of QLoRA's appendix E (arXiv 2305.14314).
NEGATIVE = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
SMALL = [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
POSITIVE = [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
LEVELS = torch.tensor([*NEGATIVE, *SMALL, *POSITIVE])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(attention_bias=True))


def nearest_levels(weight: Tensor) -> Tensor:
    """Round to the levels nearest in each block of 64 numbers, scaled by the block's largest magnitude."""
    blocks = weight.float().view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    return (LEVELS[((blocks / scale)[..., None] - LEVELS).abs().argmin(-1)] * scale).view_as(weight)


def plain_twin(of: LearnerWorker, folder: Path, **more: Any) -> LearnerWorker:
    """Return a learner whose ordinary model, in a folder, has the values of the other's base model and adapters."""
    config = of.config.model
    assert config.lora is not None
    values = dict(ModelWeights(load_model(config, dtype=torch.float32, train=False)).tensors())
    base: Any = load_model(ModelConfig(path=config.path), dtype=torch.float32, train=False)
    base.load_state_dict(values)
    plain = config.lora.model_copy(update={"quantize": None})
    twin = worker(save_model(folder, base), lora=plain, precision=of.config.learner.computes_in, **more)
    own = dict(twin.module.by_name())
    with torch.no_grad():
        for name, parameter in of.module.by_name():
            if parameter.requires_grad:
                own[name].copy_(parameter)
    return twin


def moved(model: Path, precision: str = "float64", lora: LoraSettings = NF4, **more: Any) -> LearnerWorker:
    """Return a learner whose adapters are no longer 0."""
    learner = worker(model, lora=lora, precision=precision, **more)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return learner


def test_weights_are_rounded_to_the_nearest_level_of_their_block(model: Path) -> None:
    original: Any = load_model(ModelConfig(path=str(model)), dtype=torch.float32, train=False)
    rounded = load_model(ModelConfig(path=str(model), lora=NF4), dtype=torch.float32, train=False)
    layers = quantized_layers(rounded)
    assert len(layers) == 14, "all seven linear layers of two decoder layers, and not the head"
    for name, layer in layers.items():
        weight = original.get_submodule(name).weight
        torch.testing.assert_close(layer.restored(), nearest_levels(weight), rtol=1e-6, atol=0)
        assert layer.packed.nbytes + layer.scales.nbytes == weight.numel() // 2 + weight.numel() // BLOCK * 4


@pytest.mark.parametrize(
    ("precision", "checkpointing", "lora"), grid(["float32", "float64", "bfloat16"], [False, True], [NF4, DORA])
)
def test_logprobs_and_gradients_are_those_of_ordinary_weights_with_the_same_values(
    model: Path, tmp_path: Path, precision: str, checkpointing: bool, lora: LoraSettings
) -> None:
    settings = {"activation_checkpointing": checkpointing}
    learner = moved(model, precision, lora, learner=settings)
    twin = plain_twin(learner, tmp_path / "plain", learner=settings)
    batch = whole(some_batch())
    mine, theirs = (each.score(batch, {"logprobs", "reference_logprobs"}) for each in (learner, twin))
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)
    mine_, theirs_ = (gradients(each, batch, PolicyGradient()) for each in (learner, twin))
    assert mine_
    assert_close(mine_, theirs_, {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-2}[precision])


def test_the_reference_is_the_quantized_model_without_adapters(model: Path) -> None:
    learner = moved(model)
    frozen = worker(model, lora=NF4, optimizer=None)
    (scored,) = learner.score(whole(some_batch()), {"reference_logprobs"})
    (expected,) = frozen.score(whole(some_batch()), {"logprobs"})
    assert torch.equal(scored["reference_logprobs"], expected["logprobs"])


@pytest.mark.parametrize(
    "lora", [NF4, NF4.model_copy(update={"target_modules": ["q_proj", "up_proj"]}), DORA], ids=["all", "some", "dora"]
)
def test_a_generator_gets_the_values_that_the_learner_computes_with(model: Path, lora: LoraSettings) -> None:
    learner = worker(model, lora=lora)
    for step in range(2):
        learner.update(whole(some_batch(step)), PolicyGradient())
    own = copy.deepcopy(learner.model)
    dequantize(own)
    merged: Any = own.merge_and_unload()  # type: ignore[operator]
    sent = published(learner)
    assert_close(dict(merged.state_dict()), sent, tolerance=1e-12)
    described = ModelWeights(learner.model).described()
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in sent.items()] == described


def test_a_resumed_learner_continues_bit_for_bit_and_saves_only_adapters(model: Path, tmp_path: Path) -> None:
    straight = worker(model, lora=NF4, precision="float32")
    straight.update(cut(some_batch(0), 30), PolicyGradient())
    straight.state.save(tmp_path)
    assert all("lora_" in name for name in load_tensors(tmp_path / "model.safetensors"))
    resumed = worker(model, lora=NF4, precision="float32", seed=5)
    resumed.state.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(cut(some_batch(1), 30), PolicyGradient())
    assert_same(weights(straight), weights(resumed))
    assert_same(published(straight), published(resumed))


def test_counts_are_those_of_the_ordinary_model(model: Path) -> None:
    from whet.models.flops import ModelFlops

    quantized, plain = worker(model, lora=NF4), worker(model, lora=PLAIN)
    assert (quantized.module.size, quantized.module.trained_size) == (plain.module.size, plain.module.trained_size)
    assert ModelFlops.of(quantized.model) == ModelFlops.of(plain.model)


def test_a_change_of_dtype_does_not_round_the_scales(model: Path) -> None:
    quantized: Any = load_model(ModelConfig(path=str(model), lora=NF4), dtype=torch.float32, train=False)
    layer = next(iter(quantized_layers(quantized).values()))
    before = layer.restored()
    quantized.to(torch.bfloat16)
    assert torch.equal(layer.restored(), before.to(torch.bfloat16))


def test_a_model_stored_in_bfloat16_is_quantized_as_one_in_float32(tmp_path: Path) -> None:
    half = tiny_qwen3(dtype=torch.bfloat16)
    wide = tiny_qwen3(dtype=torch.float32)
    wide.load_state_dict(half.float().state_dict())
    half.to(torch.bfloat16)
    folders = [save_model(tmp_path / name, stored) for name, stored in (("half", half), ("wide", wide))]
    assert load_tensors(folders[0] / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    one, other = (worker(folder, lora=NF4, precision="float32") for folder in folders)
    assert_same(published(one), published(other))
    batch = whole(some_batch())
    assert_same(*(each.score(batch, {"logprobs"})[0] for each in (one, other)))


def test_quantized_models_have_a_fingerprint_of_their_own(model: Path) -> None:
    plain, quantized = (ModelConfig(path=str(model), lora=lora) for lora in (PLAIN, NF4))
    assert fingerprint(plain) != fingerprint(quantized)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_mixtral())
    with pytest.raises(WhetError, match="most weights of MixtralForCausalLM are in experts"):
        load_model(ModelConfig(path=str(path), lora=NF4), dtype=torch.float32)


def test_a_reward_models_head_learns_on_a_quantized_model(tmp_path: Path) -> None:
    from tests.learner.parts import ValueLoss

    learner = worker(save_model(tmp_path, tiny_llama()), lora=NF4, head="value")
    update = learner.update(whole(some_batch()), ValueLoss())
    assert update.gradient_norm > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner": {"compile": True}}, "model.lora.quantize = nf4 computes layers in a way that"),
        ({"learner": {"type": "megatron"}}, "learner.type = megatron does not support model.lora"),
        ({"learner": {"float8": True}}, "learner.float8 = true needs precision = bfloat16, one rank, and no LoRA"),
        ({"model": {"lora": {"quantize": "nf4", "experts": True}}}, "can't be combined with experts = true"),
        ({"model": {"quantize": "nf4"}}, "quantize"),
    ],
)
def test_combinations_that_do_not_work_are_refused_when_a_recipe_is_read(
    tiny_model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        toy_recipe(tiny_model, **{"model": {"lora": {"quantize": "nf4"}}, **changes})
