"""Shared fixtures. Idle threads must not spin: tests start several processes on few cores."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    from tests.toy import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))
