"""Tiny models whose heads and sizes can be spread over ranks."""

from pathlib import Path

import pytest

from tests.learner.parts import SMALL, VOCABULARY, save_model
from tests.tiny import tiny_gemma, tiny_llama, tiny_qwen3

SIZES = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Llama with a head of its own; Qwen3 with tied embeddings and norms of queries and keys; Gemma 3 with sliding
    windows and norms that compute in float32. Two layers, but where the name says more."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": save_model(folder / "llama", tiny_llama(VOCABULARY, **SIZES)),
        "gemma": save_model(folder / "gemma", tiny_gemma(VOCABULARY, **SIZES)),
        "qwen": save_model(folder / "qwen", tiny_qwen3(VOCABULARY, **SIZES)),
        "llama of 5": save_model(folder / "llama of 5", tiny_llama(VOCABULARY, num_hidden_layers=5, **SIZES)),
        "qwen of 4": save_model(folder / "qwen of 4", tiny_qwen3(VOCABULARY, num_hidden_layers=4, **SIZES)),
    }
