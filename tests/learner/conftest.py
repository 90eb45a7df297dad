"""Tiny models on disk."""

from pathlib import Path

import pytest

from tests.learner.parts import SMALL, VOCABULARY, save_model
from tests.tiny import tiny_llama, tiny_qwen3


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied."""
    return save_model(tmp_path_factory.mktemp("llama"), tiny_llama(VOCABULARY, **SMALL))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied."""
    return save_model(tmp_path_factory.mktemp("qwen"), tiny_qwen3(VOCABULARY, **SMALL))
