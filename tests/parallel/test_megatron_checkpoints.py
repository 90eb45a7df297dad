"""Checkpoints of Megatron Core: what whet writes, Megatron Core's own functions read into its own model, on two ranks,
which computes the same as transformers; and what they write, whet reads to the last bit."""

import pickle
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import TensorProperties
from transformers import AutoModelForCausalLM

from tests.checkpoint.test_export import TOKENS as EXPORTED
from tests.checkpoint.test_export import make_run
from tests.parallel.megatron_gpt import LAYOUTS, TOKENS, load_and_save
from tests.parallel.ranks import on_ranks
from tests.tiny import (
    VOCAB,
    tiny_deepseek,
    tiny_gemma,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_tokenizer,
)
from whet.base.errors import ConfigError, WhetError
from whet.checkpoint.export import export
from whet.checkpoint.megatron_file import write_megatron
from whet.fetch.megatron import _tensors
from whet.fetch.model import fetch_model
from whet.learner.balance import BIAS
from whet.lineage.reading import model_files
from whet.models.config import LoraSettings

MODELS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "mixed layers": tiny_qwen3_moe,
    "experts": lambda: tiny_qwen3_moe(mlp_only_layers=[]),
    "mixtral": tiny_mixtral,
    "latent attention": lambda: biased(tiny_deepseek(num_experts_per_tok=4)),
}
QUICK = ["qwen2", "latent attention"]  # the most different ones
OTHERS = sorted(MODELS.keys() - QUICK)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))


def written(folder: Path, model: Any) -> Path:
    """Return a folder with a checkpoint of a model, whose norms are not 1, and what Megatron Core does not store."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    described(folder, model)
    write_megatron(model.state_dict(), model.config, folder)
    return folder


def biased(model: Any) -> Any:
    """Return a model with biases of routers that change their choices. Megatron Core rates a group by as many of its
    experts as a token may have of it, which is two, as in transformers, where a token has twice as many experts as
    groups."""
    for name, bias in model.named_buffers():
        if name.endswith(BIAS):
            bias += torch.linspace(-0.5, 0.5, len(bias))
    return model


def described(folder: Path, model: Any) -> Path:
    """Write the config and the tokenizer of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def assert_same_weights(folder: Path, model: Any) -> None:
    read = AutoModelForCausalLM.from_pretrained(fetch_model(str(folder))).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.skipif(
    hasattr(TensorProperties, "strides"), reason="megatron-core 0.16 reads no checkpoint with torch 2.15 or newer"
)
@pytest.mark.parametrize(
    "families", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["two families", "other families"]
)
def test_megatron_core_and_whet_read_what_the_other_writes(tmp_path: Path, families: list[str]) -> None:
    """In one group of ranks, because each imports Megatron Core, which takes seconds."""
    pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")
    models: dict[str, Any] = {family: MODELS[family]() for family in families}
    jobs = []
    for family, model in models.items():
        source = written(tmp_path / family / "whet's", model)
        assert_same_weights(source, model)
        outs = {name: tmp_path / family / name / "iter_0000012" for name in LAYOUTS}
        jobs.append((model.config, source / "release", outs))
    for results in on_ranks(2, load_and_save, jobs):
        for model, (logits, absent) in zip(models.values(), results, strict=True):
            assert not absent
            with torch.no_grad():
                expected = model.eval()(torch.tensor(TOKENS)).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)
    for model, (_, _, outs) in zip(models.values(), jobs, strict=True):
        for out in outs.values():
            described(out.parent, model)
            (out.parent / "latest_checkpointed_iteration.txt").write_text("12\n")
            assert_same_weights(out.parent, model)
            assert_same_weights(described(out, model), model)


def test_an_export_is_a_model_to_start_from_with_the_learners_weights(tmp_path: Path) -> None:
    run, logits = make_run(tmp_path, tiny_qwen3(), LoraSettings(rank=2))
    export(run, tmp_path / "out", megatron=True, dtype="float32")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(fetch_model(str(tmp_path / "out")))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor(EXPORTED)).logits, logits, rtol=0, atol=1e-5)
    used = [path.name for path in model_files(tmp_path / "out")]
    assert {".metadata", "__0_0.distcp"} <= set(used)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_gemma())
    with pytest.raises(ConfigError, match=r"written for llama, .*, and this model is 'gemma3_text'; leave out"):
        export(run, tmp_path / "out", megatron=True)
    with pytest.raises(ConfigError, match="two formats"):
        export(run, tmp_path / "out", megatron=True, gguf="f32")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(WhetError, match=r"out can't be written: \[Errno 27\] File too large"):
            export(run, tmp_path / "out", megatron=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_interrupt_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch's writer of files does

    monkeypatch.setattr("torch.save", interrupted)
    model = tiny_llama()
    with pytest.raises(KeyboardInterrupt):
        write_megatron(model.state_dict(), model.config, tmp_path)


def test_a_padded_vocabulary_is_cut_and_states_of_optimizers_are_left_out(tmp_path: Path) -> None:
    model = tiny_llama()
    described(tmp_path / "model", model)
    rows = torch.full((6, 64), 9.0)
    weights = {name: torch.cat([t, rows]) if t.shape[0] == VOCAB else t for name, t in model.state_dict().items()}
    write_megatron(weights, model.config, tmp_path / "model")
    before = read(tmp_path / "model")
    save(
        before | {"optimizer.state.exp_avg.output_layer.weight": torch.ones(3)},
        storage_writer=FileSystemWriter(tmp_path / "model" / "release"),
        no_dist=True,
    )
    assert before["output_layer.weight"].shape == (VOCAB + 6, 64)
    assert_same_weights(tmp_path / "model", model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"decoder.layers.mlp.linear_fc3.weight": torch.ones(2, 3)},
            r"linear_fc3\.weight has no counterpart in a",
        ),
        ({"decoder.final_layernorm.weight": None}, r"model\.norm\.weight is missing, not \[64\]"),
        ({"decoder.final_layernorm.weight": torch.ones(8)}, r"model\.norm\.weight is \[8\], not \[64\]"),
        ({"decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 250, 64)}, r"can't be read as the model of"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = written(tmp_path / "model", tiny_llama())
    tensors = {key: tensor for key, tensor in (read(folder) | changes).items() if tensor is not None}
    save(tensors, storage_writer=FileSystemWriter(folder / "release"), no_dist=True)
    with pytest.raises(WhetError, match=words):
        fetch_model(str(folder))
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_a_checkpoint_that_another_version_of_python_wrote_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", model := tiny_llama())
    metadata = folder / "release" / ".metadata"
    pickled = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    for module in (b"pathlib", b"pathlib._local"):  # Python 3.13 names the second
        pickled, changed = re.subn(rb"cpathlib(\._local)?\n", b"c%s\n" % module, pickled)
        assert changed
        metadata.write_bytes(pickled)
        assert_same_weights(folder, model)


def test_every_version_of_torch_reads_what_any_other_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lengths = TensorProperties.__getstate__, set[int]()  # type: ignore[attr-defined]
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda each: (*plain(each)[:5], (1,)))  # as torch 2.15 does
    written(tmp_path / "model", model := tiny_qwen2())
    inner = described(tmp_path / "other", model) / "release"
    save({"decoder.weight": torch.ones(3)}, storage_writer=FileSystemWriter(inner), no_dist=True)
    assert dict(_tensors(inner))["decoder.weight"].tolist() == [1, 1, 1]
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda _, state: lengths.add(len(state)))
    pickle.loads((tmp_path / "model" / "release" / ".metadata").read_bytes())
    assert lengths == {5}


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", tiny_llama())
    for stack in ("os\nsystem", "torch.distributed.checkpoint.filesystem\nos.system", "torch\nload"):
        (folder / "release" / ".metadata").write_bytes(f"c{stack}\n(S'touch {tmp_path}/ran'\ntR.".encode())
        with pytest.raises(WhetError, match=r"\.metadata would load .*, which no checkpoint needs"):
            fetch_model(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_config_or_with_another_format_says_what_to_do(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", tiny_llama())
    (folder / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(WhetError, match=r"which has no config\.json; copy config\.json and the tokenizer"):
        fetch_model(str(folder))
    (tmp_path / "config.json").rename(folder / "config.json")
    (folder / "release" / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    with pytest.raises(WhetError, match="has Megatron Core's format fsdp_dtensor"):
        fetch_model(str(folder))
    (folder / "latest_checkpointed_iteration.txt").write_text("70")
    with pytest.raises(WhetError, match=r"says '70', but .*iter_0000070 has no checkpoint"):
        fetch_model(str(folder))


def read(folder: Path) -> dict[str, Any]:
    """Return the weights of a folder's checkpoint under Megatron Core's keys."""
    return dict(_tensors(folder / "release"))
