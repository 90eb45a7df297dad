"""A GGUF file holds the exported model: gguf's reader and transformers' own loader read the same numbers and tokens."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.checkpoint.test_export import TOKENS, make_run
from tests.forks import whet
from tests.tiny import CHAT_TEMPLATE, SPECIAL, _build, _sizes, tiny_gemma, tiny_llama, tiny_qwen3
from whet.base.errors import ConfigError, WhetError
from whet.checkpoint.export import export
from whet.checkpoint.gguf_file import _CUTS, GgufType, write_gguf
from whet.models.config import LoraSettings

VOCAB = 320
TEXT = "It's 12345 o'clock,   and\n\n she SAYS: héllo wörld! 2024-01-01 they'll  go"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tokenizer_for(cut: str = "gpt-2") -> PreTrainedTokenizerFast:
    """Return a tokenizer of fewer than ``VOCAB`` tokens that merges bytes, trained on one line."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[Any] = []
    for step in next(steps for steps, name in _CUTS.items() if name == cut):
        made = {"bytes of words": words, "bytes": plain, "single digits": pre_tokenizers.Digits(individual_digits=True)}
        steps.append(made.get(step) or pre_tokenizers.Split(Regex(step), "isolated"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_qwen2() -> Any:
    return _build(Qwen2ForCausalLM, Qwen2Config(**_sizes(VOCAB, {"head_dim": 16})), torch.float32, 0)


def saved(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (tokenizer or tokenizer_for()).save_pretrained(folder)
    return folder


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(tokens).logits
    return result


MODELS = {
    "llama": lambda: tiny_llama(VOCAB),
    "qwen2": tiny_qwen2,
    "qwen3, tied": lambda: tiny_qwen3(VOCAB, head_dim=128),  # the only size that transformers' loader expects
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("kind", "error"), [("f32", 1e-5), ("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 3e-2)])
def test_transformers_computes_the_same_logits(
    family: str, kind: GgufType, error: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = saved(tmp_path / "model", MODELS[family]())
    write_gguf(folder, tmp_path / "model.gguf", kind, "tiny")
    tokens = torch.tensor([list(range(5, 40))])
    expected = logits(AutoModelForCausalLM.from_pretrained(folder), tokens)
    read = logits(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf"), tokens)
    assert (read - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("cut", ["gpt-2", "qwen2", "llama-bpe"])
def test_the_tokenizer_is_read_back(cut: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(cut)
    write_gguf(saved(tmp_path / "model", tiny_llama(VOCAB), tokenizer), tmp_path / "model.gguf", "f32", "tiny")
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (TEXT, "<|im_start|>user\nhi<|im_end|>", " 007"):
        assert read(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == cut
    assert fields["tokenizer.chat_template"].contents() == CHAT_TEMPLATE
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{VOCAB - 1}]"
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert [kinds[number] for number in (0, 3, VOCAB - 1)] == [3, 1, 5]


def test_slower_rotations_of_llama3_are_written_as_factors(tmp_path: Path) -> None:
    model = tiny_llama(VOCAB, rope_parameters=LLAMA3)
    write_gguf(saved(tmp_path / "model", model), tmp_path / "model.gguf", "f16", "tiny")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    factors = torch.from_numpy(dequantize(tensors["rope_freqs.weight"].data, tensors["rope_freqs.weight"].tensor_type))
    usual = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(usual / factors, model.model.rotary_emb.inv_freq)
    assert factors[0] == 1 < factors[-1] == 8


def test_a_run_is_exported_as_one_file(tmp_path: Path) -> None:
    run, expected = make_run(tmp_path, tiny_llama(), LoraSettings(rank=4))
    done = whet("export", str(run), "--out", str(tmp_path / "out"), "--gguf", "f16", "--name", "policy")
    assert (done.returncode, "and --gguf a file for llama.cpp" in done.stderr) == (2, True)
    done = whet("export", str(run), "--out", str(tmp_path / "out"), "--gguf", "f16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"written: {tmp_path / 'out' / 'model-f16.gguf'}\n")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["README.md", "lineage.json", "model-f16.gguf"]
    assert "llama-server -m model-f16.gguf" in (tmp_path / "out" / "README.md").read_text()
    export(run, tmp_path / "merged")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for parameter in rounded.parameters():
        if parameter.dim() == 2:  # norms stay in float32
            parameter.data = parameter.half().float()
    tokens = torch.tensor(TOKENS)
    read = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model-f16.gguf"), tokens)
    torch.testing.assert_close(read, logits(rounded, tokens), rtol=1e-4, atol=1e-5)
    assert (read - expected).abs().max() < 5e-3 * expected.abs().max()


def test_a_file_that_can_not_be_written_is_closed(tmp_path: Path) -> None:
    model = tiny_llama(VOCAB)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] = 1e6
    with pytest.raises(WhetError) as caught:  # which keeps the writer
        write_gguf(saved(tmp_path / "model", model), tmp_path / "model.gguf", "f16", "tiny")
    open_files = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert "ffn_down" in str(caught.value)
    assert str(tmp_path / "model.gguf") not in open_files


def test_other_models_and_tokenizers_are_refused_in_words(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_gemma())
    with pytest.raises(ConfigError, match="written for llama, qwen2, qwen3, and this model is 'gemma3_text'"):
        export(run, tmp_path / "out", gguf="f16")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(run)
    run, _ = make_run(tmp_path, tiny_llama(), LoraSettings(rank=4))
    with pytest.raises(ConfigError, match="holds a whole policy"):
        export(run, tmp_path / "out", gguf="f16", adapter_only=True)
    with pytest.raises(ConfigError, match="leave out --dtype"):
        export(run, tmp_path / "out", gguf="f16", dtype="float32")
    sliding = tiny_qwen3(VOCAB, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    yarn = tiny_llama(VOCAB, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0})
    cut = tokenizer_for()
    cut.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for number, (model, tokenizer, problem) in enumerate(
        [
            (sliding, None, "sliding window"),
            (yarn, None, "type 'yarn'"),
            (tiny_llama(VOCAB, hidden_act="relu"), None, "with silu, not 'relu'"),
            (tiny_llama(VOCAB), cut, "cuts text in a way"),
        ]
    ):
        folder = saved(tmp_path / str(number), model, tokenizer)
        with pytest.raises(ConfigError, match=problem):
            write_gguf(folder, tmp_path / "model.gguf", "f16", "tiny")
