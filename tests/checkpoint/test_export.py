"""An exported run loads with plain transformers or peft, without whet, and computes the same logits as the learner."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.without_whet import run_without_whet
from tests.learner.parts import published
from tests.tiny import tiny_llama, tiny_mixtral, tiny_qwen3, tiny_tokenizer
from whet.base.errors import ConfigError
from whet.base.files import load_tensors, save_tensors
from whet.base.staged_folder import staged_folder
from whet.checkpoint.export import export
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.rounding import kept_share, warn_of_rounding
from whet.checkpoint.store import CheckpointStore
from whet.config import dump_yaml
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.optimizer_config import OptimizerConfig, ParameterGroup
from whet.learner.worker import LearnerWorker
from whet.lineage.record import Record, Session
from whet.metrics.sinks.jsonl import encode_line
from whet.models.config import LoraSettings, ModelConfig

TOKENS = [[5, 17, 99, 3, 250, 41, 7]]

# Prints for each [folder, kind] the logits of TOKENS, their dtype, the end token and a rendered chat.
READER = """
import peft, torch, transformers

results = []
for folder, kind in json.loads(sys.argv[1]):
    loader = peft.AutoPeftModelForCausalLM if kind == "adapter" else transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype="auto").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor(json.loads(sys.argv[2]))).logits
    chat = [{"role": "user", "content": "hi"}]
    results.append({
        "logits": logits.float().tolist(), "dtype": str(logits.dtype), "eos": model.generation_config.eos_token_id,
        "chat": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
    })
print(json.dumps(results))
"""


def read_back(*exported: tuple[Path, str]) -> list[dict[str, Any]]:
    folders = [[str(folder), kind] for folder, kind in exported]
    results: list[dict[str, Any]] = run_without_whet(READER, folders, TOKENS, folder=exported[0][0])
    return results


def make_run(
    folder: Path,
    base: Any,
    lora: LoraSettings | None = None,
    chat_template: str | None = None,
    change: float = 0.05,
    groups: tuple[ParameterGroup, ...] = (),
) -> tuple[Path, torch.Tensor]:
    """Return (a run with one checkpoint, at step 3, saved by a real learner; the learner's logits of TOKENS)."""
    base.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    model = ModelConfig(path=str(folder / "base"), lora=lora)
    worker = LearnerWorker(
        WorkerConfig(
            model=model,
            learner=LearnerConfig(matmul_precision="highest"),
            optimizer=OptimizerConfig(groups=groups),
            steps=3,
            seed=5,
        )
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            if parameter.requires_grad:
                parameter += change * torch.randn_like(parameter)
    run = folder / "run"
    run.mkdir()
    recipe = {"description": "counting | sheep", "steps": 3, "model": model.model_dump(mode="json")}
    recipe |= {"algorithm": {"type": "grpo"}, "chat_template": chat_template, "checkpoints": {"keep_last": 2}}
    (run / "recipe.yaml").write_text(dump_yaml(recipe))
    lines = [encode_line(0, {"evaluation/accuracy": 0.25}, "evaluation")]
    lines += [encode_line(3, {"evaluation/accuracy": 0.5}, "evaluation")]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))

    def write(staging: Path) -> None:
        (staging / "policy").mkdir()
        worker.state.save(staging / "policy")

    asyncio.run(CheckpointStore(run / "checkpoints").save(3, write, {}, 0.5))
    with torch.no_grad():
        named: dict[str, torch.Tensor] = published(worker)
        plain = type(base)(base.config).eval()
        plain.load_state_dict({name: tensor.float() for name, tensor in named.items()})
        return run, plain(torch.tensor(TOKENS)).logits


def test_a_fully_trained_model_round_trips_without_whet(tmp_path: Path) -> None:
    expected = []
    for name, build in (("untied", tiny_llama), ("tied", tiny_qwen3)):
        (tmp_path / name).mkdir()
        run, logits = make_run(tmp_path / name, build())
        assert export(run, tmp_path / name / "out").step == 3
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["base", "out", "run"]
        assert (tmp_path / name / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644
        config = (tmp_path / name / "out" / "config.json").read_text()
        assert not any(word in config for word in ("forest", "whet", str(tmp_path)))
        expected.append(logits)
    exports = read_back((tmp_path / "untied" / "out", "model"), (tmp_path / "tied" / "out", "model"))
    for result, logits in zip(exports, expected, strict=True):
        torch.testing.assert_close(torch.tensor(result["logits"]), logits, rtol=1e-5, atol=1e-5)
        assert result["dtype"] == "torch.float32"
        assert result["chat"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert result["eos"] == tiny_tokenizer().eos_token_id


def test_lora_is_merged_or_exported_as_an_adapter(tmp_path: Path) -> None:
    run, logits = make_run(tmp_path, tiny_llama(), LoraSettings(rank=4))
    export(run, tmp_path / "merged", 3)
    export(run, tmp_path / "adapter", "latest", adapter_only=True)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert "AutoPeftModelForCausalLM" in (tmp_path / "adapter" / "README.md").read_text()
    for result in read_back((tmp_path / "merged", "model"), (tmp_path / "adapter", "adapter")):
        torch.testing.assert_close(torch.tensor(result["logits"]), logits, rtol=1e-4, atol=1e-4)


def test_frozen_parts_of_an_adapter_are_exported(tmp_path: Path) -> None:
    frozen = (ParameterGroup(match="lora_A", freeze=True),)
    run, logits = make_run(tmp_path, tiny_llama(), LoraSettings(rank=4), groups=frozen)
    export(run, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(torch.tensor(TOKENS)).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapted_experts_are_merged_or_exported_as_peft_reads_them(tmp_path: Path) -> None:
    run, logits = make_run(tmp_path, tiny_mixtral(), LoraSettings(rank=4, experts=True))
    export(run, tmp_path / "merged", 3)
    export(run, tmp_path / "adapter", "latest", adapter_only=True)
    for result in read_back((tmp_path / "merged", "model"), (tmp_path / "adapter", "adapter")):
        torch.testing.assert_close(torch.tensor(result["logits"]), logits, rtol=1e-4, atol=1e-4)


def test_the_dtype_is_the_base_models_or_the_requested_one(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama(dtype=torch.bfloat16))
    export(run, tmp_path / "as_base")
    export(run, tmp_path / "float32", dtype="float32")
    trained = load_tensors(run / "checkpoints" / "step-000003" / "policy" / "model.safetensors")
    for name, kind in (("as_base", torch.bfloat16), ("float32", torch.float32)):
        written = load_tensors(tmp_path / name / "model.safetensors")
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
        for key, tensor in trained.items():
            assert torch.equal(written[key], tensor.to(kind))


@pytest.mark.parametrize("gguf", [None, "f16"])
def test_a_weight_that_is_too_large_for_float16_is_named(tmp_path: Path, gguf: Literal["f16"] | None) -> None:
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight[3, 5] = -1e5
    run, _ = make_run(tmp_path, base)
    dtype: Literal["float16"] | None = None if gguf else "float16"
    with pytest.raises(ConfigError, match=r"(up_proj|ffn_up).weight has the value -100000, .* too large for float16"):
        export(run, tmp_path / "out", dtype=dtype, gguf=gguf)
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "wide", dtype="bfloat16")


@pytest.mark.parametrize(("gguf", "value", "kind"), [("q8_0", 1e7, "float16 scales"), ("bf16", 3.4e38, "bfloat16")])
def test_a_weight_that_is_too_large_for_a_gguf_file_is_named(
    tmp_path: Path, gguf: Literal["q8_0", "bf16"], value: float, kind: str
) -> None:
    base = tiny_llama()
    with torch.no_grad():
        base.model.embed_tokens.weight[-1, 5] = value  # of a token that no text has
    run, _ = make_run(tmp_path, base)
    with pytest.raises(ConfigError, match=rf"token_embd.weight has the value .*, which is too large for {kind};"):
        export(run, tmp_path / "out", gguf=gguf)
    assert not (tmp_path / "out").exists()


def test_an_export_says_if_rounding_takes_away_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = make_run(tmp_path, tiny_llama(dtype=torch.bfloat16))
    base = load_tensors(tmp_path / "base" / "model.safetensors")
    export(run, tmp_path / "far")
    export(run, tmp_path / "same", dtype="float32")
    assert "of what the run changed" not in caplog.text
    near = {name: tensor.float() * (1 + 2**-12) for name, tensor in base.items()}
    assert kept_share(near, tmp_path / "base", torch.bfloat16) == 0.0
    assert kept_share(near, tmp_path / "base", torch.float32) == pytest.approx(1.0)
    assert kept_share(base, tmp_path / "base", torch.bfloat16) is None
    (run / "machine.json").write_text('{"generator": "bfloat16"}')  # then rounded weights have answered
    warn_of_rounding(near, tmp_path / "base", torch.bfloat16, run, "--dtype float32")
    assert "of what the run changed" not in caplog.text
    for text in ('{"generator": "float32"}', '{"generator": null}', "[", "[]"):
        caplog.clear()
        (run / "machine.json").write_text(text)
        warn_of_rounding(near, tmp_path / "base", torch.bfloat16, run, "--dtype float32")
        assert "in bfloat16 about 0% of what the run changed is left" in caplog.text


def test_a_gguf_file_says_if_rounding_takes_away_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = make_run(tmp_path, tiny_llama(dtype=torch.bfloat16), change=1e-6)
    kinds: tuple[Literal["f32", "q8_0"], ...] = ("f32", "q8_0")
    for kind in kinds:
        export(run, tmp_path / kind, gguf=kind)
        assert "of what the run changed" not in caplog.text
    export(run, tmp_path / "bf16", gguf="bf16")
    assert "of what the run changed is left" in caplog.text
    assert "Write it in float32 (--gguf f32)" in caplog.text


def test_the_chat_template_of_the_recipe_is_exported(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    run, _ = make_run(tmp_path, tiny_llama(), chat_template=template)
    export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi<|im_end|>\nassistant: "


def test_the_card_has_the_origin_and_the_evaluation(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama())
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("counting \\| sheep", "3 of 3", "grpo", "| accuracy | 0.25 | 0.5 |", "AutoModelForCausalLM"):
        assert words in card


def test_no_file_that_is_published_names_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/whet", "train", "sft", f"data.path={tmp_path}/my rows.jsonl"])
    run, _ = make_run(tmp_path, tiny_llama())
    Record(kind="run", folder=str(run), sessions=(Session.now(),)).write(run)
    export(run, tmp_path / "out")
    texts = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert b"Trained from `base`" in texts["README.md"]
    assert b"whet train sft 'data.path=my rows.jsonl'" in texts["README.md"]
    assert [name for name, text in texts.items() if str(tmp_path).encode() in text] == ["lineage.json"]


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama())
    out = tmp_path / "out"
    out.mkdir()
    export(run, out)
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(run, out)
    assert (out / "mine.txt").exists()
    export(run, out, force=True)
    assert not (out / "mine.txt").exists()
    assert (out / "model.safetensors").exists()
    with pytest.raises(ConfigError, match=r"recipe\.yaml is a file; name a folder to create"):
        export(run, run / "recipe.yaml", force=True)
    with staged_folder(out), pytest.raises(ConfigError, match="out is being written by another process"):
        export(run, out, force=True)


def test_an_export_does_not_replace_what_it_is_made_from_or_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path, tiny_llama())
    for folder in (".", "run", "run/checkpoints", "run/checkpoints/step-000003"):
        with pytest.raises(
            ConfigError, match="is the place of the checkpoints of the run, which an export would remove"
        ):
            export(run, tmp_path / folder, force=True)
    with pytest.raises(ConfigError, match="is the place of the model that the run starts from"):
        export(run, tmp_path / "base", force=True)
    (tmp_path / "empty/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty/inner")
    for name in (".", ".."):
        with pytest.raises(ConfigError, match="holds the working folder, which an export would replace"):
            export(run, Path(name), force=name == "..")
    for folder in (run / "exported", tmp_path / "base/exported"):  # new ones, which hold nothing
        export(run, folder)
    export(run, tmp_path / "base/exported", force=True)
    assert (run / "checkpoints/latest").is_file()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model: {path: 5}", "model: path: expected text, got the number 5"),
        ("model: {path: a, trust_remote_code: {}}", "model: trust_remote_code: expected true or false, got a mapping"),
        ("model: {path: a}\ncheckpoints: latest", "checkpoints: expected a mapping, got text 'latest'"),
        ("model: {path: a}\npolicies: [b]", "policies: expected a mapping whose values are mappings"),
    ],
)
def test_a_setting_of_a_wrong_type_in_the_runs_recipe_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "recipe.yaml").write_text(line)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'recipe.yaml'}: {said}")):
        export(tmp_path, tmp_path / "out", policy="b" if "policies" in line else "")


def test_a_recipe_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"model: {path: \xff}")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is damaged: not UTF-8 text \(invalid start byte at byte 14\)"):
        export(tmp_path, tmp_path / "out")


def test_refused_exports_leave_no_folder(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama())
    with pytest.raises(ConfigError, match="without LoRA"):
        export(run, tmp_path / "out", adapter_only=True)
    with pytest.raises(CheckpointError, match="no checkpoint of step 99"):
        export(run, tmp_path / "out", 99)
    with pytest.raises(ConfigError, match=r"no recipe\.yaml"):
        export(tmp_path, tmp_path / "out")

    def write_incomplete(staging: Path) -> None:
        (staging / "policy").mkdir()
        tensors = load_tensors(run / "checkpoints" / "step-000003" / "policy" / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_tensors(staging / "policy" / "model.safetensors", tensors)

    asyncio.run(CheckpointStore(run / "checkpoints").save(4, write_incomplete, {}))
    with pytest.raises(CheckpointError, match=r"policy does not fit .*: model\.norm\.weight is missing"):
        export(run, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]
