"""Naming vLLM in a recipe imports nothing, and where it is not installed the answer says what to do."""

import importlib.util
import subprocess
import sys

import pytest

from tests.tiny import tiny_llama
from whet.errors import ConfigError
from whet.generators.vllm_config import VllmGeneratorConfig


def test_a_recipe_with_vllm_is_read_without_torch_and_vllm() -> None:
    code = (
        "import sys; from whet.config import load; from whet.recipe import Recipe;"
        "load(Recipe, 'quickstart', ['generator={type: router, replica: {type: vllm, dtype: float32}}']);"
        "load(Recipe, 'quickstart', ['generator=vllm', 'generator.max_batch=8']);"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_vllm_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make install-vllm"):
        VllmGeneratorConfig().build(tiny_llama().config, None)
