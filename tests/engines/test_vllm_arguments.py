"""The arguments of the engine, checked by vLLM's own code. No engine runs."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_qwen3, tiny_tokenizer
from whet.engines.config import Deployment
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.processes import VllmProcesses, _write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def understood(**settings: object) -> Any:
    """Return vLLM's settings of an engine on CPUs."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    processes = VllmProcesses(VllmGeneratorConfig(**settings), Deployment())
    try:
        _write(processes.folder, tiny_qwen3().config, tiny_tokenizer())
        return AsyncEngineArgs(**processes._settings()).create_engine_config()
    finally:
        for file in processes.folder.iterdir():
            file.unlink()
        processes.folder.rmdir()


def test_weights_and_cache_in_8_bits() -> None:
    found = understood(quantization="fp8", kv_dtype="fp8", max_context=256)
    assert found.model_config.quantization == "fp8_per_channel"
    assert found.cache_config.cache_dtype == "fp8"


def test_guesses_from_the_text() -> None:
    found = understood(speculative={"type": "ngram", "tokens": 3, "longest": 5}, max_context=256).speculative_config
    assert (found.method, found.num_speculative_tokens) == ("ngram", 3)
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == (5, 2)


def test_guesses_of_a_draft_model_whose_weights_are_read(tmp_path: Path) -> None:
    model = tiny_qwen3(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = understood(speculative={"type": "draft", "model": str(tmp_path)}, max_context=256)
    spec = found.speculative_config
    assert spec.uses_draft_model()
    assert spec.draft_load_config.load_format == "auto"
    assert found.load_config.load_format == "dummy"
