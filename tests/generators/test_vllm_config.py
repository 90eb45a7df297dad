"""Naming vLLM in a recipe imports nothing, and where it is not installed the answer says what to do."""

import importlib.util
import os
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


def test_an_engine_beside_gpus_has_to_say_which_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"generator\.devices is not set: .* the GPU that the learner computes on"):
        VllmGeneratorConfig().build(tiny_llama().config, None)
    assert VllmGeneratorConfig(devices="2,3").build(tiny_llama().config, None).config.devices == "2,3"


def test_the_engine_is_born_with_its_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.generators.vllm_start import _environment

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with _environment(VllmGeneratorConfig(devices="2"), "mark"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"
