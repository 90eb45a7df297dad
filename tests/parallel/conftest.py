"""Tiny models whose heads and sizes can be split over ranks."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.learner.parts import SMALL, VOCABULARY, save_model
from tests.tiny import tiny_deepseek, tiny_gemma, tiny_llama, tiny_mixtral, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe
from tests.tiny_vision import Family, save_tiny_vision
from whet.models.tiny_vision import save_tiny_vision_model

VISION: tuple[Family, ...] = ("idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3")
SIZES = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}


def save(folder: Path, model: PreTrainedModel) -> Path:
    """Save a model with weights of norms that bfloat16 can't represent, and biases, unlike the initial ones."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return save_model(folder, model)


def one_sided(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with a router that sends all tokens to the first half of the experts."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias[: len(bias) // 2] += 100.0
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by name, with two layers unless the name says more: Llama with an untied head; Qwen2 with biases;
    Qwen3 with tied embeddings and norms of queries and keys; Gemma 3 with sliding windows and norms that compute in
    float32; mixtures of experts, of which DeepSeek's router computes in float32; models that read images. "wide" is
    Qwen3 with biases and a hidden size of 128."""
    folder = tmp_path_factory.mktemp("models")
    for family in VISION:
        save_tiny_vision(folder / family, family)
    save_tiny_vision_model(folder / "idefics3 of 4", width=32, layers=4, pixels=32)
    return {
        **{family: folder / family for family in (*VISION, "idefics3 of 4")},
        "llama": save(folder / "llama", tiny_llama(VOCABULARY, **SIZES)),
        "gemma": save(folder / "gemma", tiny_gemma(VOCABULARY, **SIZES)),
        "moe": save(folder / "moe", tiny_qwen3_moe(VOCABULARY, **SIZES, moe_intermediate_size=8)),
        "mixtral": save(folder / "mixtral", tiny_mixtral(VOCABULARY, **SIZES)),
        "two experts": save(folder / "two", tiny_mixtral(VOCABULARY, **SIZES, num_local_experts=2)),
        "deepseek": save(folder / "deepseek", tiny_deepseek(VOCABULARY, **SIZES)),
        "deepseek, yarn": save(folder / "yarn", tiny_deepseek(VOCABULARY, **SIZES, rope_parameters=YARN)),
        "deepseek, plain queries": save(folder / "plain", tiny_deepseek(VOCABULARY, **SIZES, q_lora_rank=None)),
        "deepseek, dense": save(folder / "dense", tiny_deepseek(VOCABULARY, **SIZES, first_k_dense_replace=2)),
        "one-sided": save(folder / "one-sided", one_sided(tiny_deepseek(VOCABULARY, **SIZES))),
        "qwen": save(folder / "qwen", tiny_qwen3(VOCABULARY, **SIZES)),
        "qwen2": save(folder / "qwen2", tiny_qwen2(VOCABULARY, **SIZES)),
        "wide": save(folder / "wide", tiny_qwen3(VOCABULARY, **WIDE)),
        "llama of 5": save(folder / "llama of 5", tiny_llama(VOCABULARY, num_hidden_layers=5, **SIZES)),
        "qwen of 4": save(folder / "qwen of 4", tiny_qwen3(VOCABULARY, num_hidden_layers=4, **SIZES)),
    }
