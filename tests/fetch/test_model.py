"""Downloads from the Hub are limited to the files that are needed."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from tests.tiny import tiny_llama
from whet.base.errors import WhetError
from whet.fetch import model as fetching
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config, resolve


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the file patterns of the downloads from the Hub, one list for each."""
    patterns: list[list[str]] = []
    tiny_llama().config.save_pretrained(tmp_path)

    def snapshot_download(path: str, *, allow_patterns: list[str], **_: Any) -> str:
        patterns.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(fetching, "_hub_answers", lambda: True)
    return patterns


def test_a_config_costs_no_download_of_weights(downloads: list[list[str]]) -> None:
    config = load_model_config(ModelConfig(path="some/model"))
    assert config.num_hidden_layers == 2
    assert downloads == [["*.json"]]


def test_code_is_downloaded_if_it_is_trusted(downloads: list[list[str]]) -> None:
    resolve(ModelConfig(path="some/model"))
    resolve(ModelConfig(path="some/model", trust_remote_code=True))
    assert ["*.safetensors" in kinds for kinds in downloads] == [True, True]
    assert ["*.py" in kinds for kinds in downloads] == [False, True]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b'{"model_type": "lla', r"is damaged, it is not JSON: .*; copy or download it again"),
        ("tokenizer.json", b"\xff\xfe", "is damaged, it is not JSON"),
        ("tokenizer_config.json", b"[1]", "is not a JSON object, but a list"),
        ("model.safetensors.index.json", b"{}", "is damaged: it has no 'weight_map'"),
        ("model.safetensors", b"", "is damaged; copy or download it again"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS, not the weights",
        ),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}x", "is damaged: it has 11 bytes, and its header says 10; copy or"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WhetError, match=f"the model's file {tmp_path / name} {words}"):
        fetching.check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_file_without_permission_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    (tmp_path / name).touch()
    original = Path.open

    def refused(self: Path, *args: Any, **named: Any) -> Any:  # root may read everything
        if self.name == name:
            raise PermissionError(13, "Permission denied")
        return original(self, *args, **named)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(WhetError, match=f"the model's file {tmp_path / name} can't be read: Permission denied"):
        fetching.check_model(str(tmp_path))


def test_weights_that_the_index_names_are_there_where_weights_are_read(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    fetching.fetch_model(str(tmp_path), with_weights=False)
    with pytest.raises(WhetError, match=rf"{tmp_path}/1.safetensors is missing \(1 of those in .*index.json\)"):
        fetching.fetch_model(str(tmp_path))


@pytest.mark.parametrize("stored", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_numbers_need_a_config_that_explains_them(
    tmp_path: Path, stored: torch.dtype
) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    weights = {name: tensor.to(stored) if "mlp" in name else tensor for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WhetError, match=r"model\.safetensors has 6 weights of the type \w+, such as .*mlp.*bfloat16"):
        fetching.fetch_model(str(tmp_path))
    weights |= {name: model.state_dict()[name] for name in list(weights) if "mlp" in name and "0.mlp.up" not in name}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WhetError, match=r"model\.safetensors has 1 weight of the type \w+, such as .*0\.mlp\.up"):
        fetching.fetch_model(str(tmp_path))
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    fetching.fetch_model(str(tmp_path))


def test_masks_and_positions_may_be_integers(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    buffers = {"h.0.attn.bias": torch.ones(2, 2, dtype=torch.bool), "embeddings.position_ids": torch.arange(4)}
    save_file(buffers, tmp_path / "model.safetensors", {"format": "pt"})
    fetching.fetch_model(str(tmp_path))


def test_a_folder_with_a_gguf_file_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model-q8_0.gguf").touch()
    with pytest.raises(WhetError, match="holds a model as GGUF, which is for llama"):
        fetching.check_model(str(tmp_path))


def test_the_folder_of_a_run_is_named_as_one_with_the_command_that_writes_its_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(WhetError, match=f"is the folder of a run; write its model with whet export {tmp_path} --out"):
        fetching.check_model(str(tmp_path))
