"""A model of the Hub is downloaded, and of one that is only planned, its config alone."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.tiny import tiny_llama
from whet.fetch import model as fetching
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config, resolve


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The kinds of files that the Hub is asked for, one list for each download."""
    wanted: list[list[str]] = []
    tiny_llama().config.save_pretrained(tmp_path)

    def snapshot_download(path: str, *, allow_patterns: list[str], **_: Any) -> str:
        wanted.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(fetching, "_hub_answers", lambda: True)
    return wanted


def test_a_config_costs_no_download_of_weights(asked: list[list[str]]) -> None:
    config = load_model_config(ModelConfig(path="some/model"))
    assert config.num_hidden_layers == 2
    assert asked == [["*.json"]]


def test_code_is_downloaded_where_it_is_trusted(asked: list[list[str]]) -> None:
    resolve(ModelConfig(path="some/model"))
    resolve(ModelConfig(path="some/model", trust_remote_code=True))
    assert ["*.safetensors" in kinds for kinds in asked] == [True, True]
    assert ["*.py" in kinds for kinds in asked] == [False, True]
