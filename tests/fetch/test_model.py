"""Downloads from the Hub are limited to the files that are needed."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.tiny import tiny_llama
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
