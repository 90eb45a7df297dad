"""Addresses and keys that can't work are refused before they are used, and keys are never shown."""

import re
from typing import Any

import pytest

from whet.base.addresses import checked_address, hidden, key_in
from whet.base.errors import ConfigError
from whet.checkpoint.config import CheckpointConfig
from whet.cli.main import main
from whet.distillation.teacher import TeacherServer
from whet.engines.server.config import RemoteConfig
from whet.metrics.sinks.mlflow import MlflowSink
from whet.metrics.sinks.trackio import TrackioSink
from whet.shells.remote import Remote
from whet.tasks.adapters.openenv import OpenEnv
from whet.tasks.gym.tasks import NemoGym
from whet.tasks.judges.config import Judge

WRONG = ["127.0.0.1:99999/v1", "127.0.0.1:x", "[::1/v1", "", "a b/v1", "a/v1#model", "a/v1?version=2", ":80"]


@pytest.mark.parametrize("rest", WRONG)
def test_an_address_that_can_not_be_reached_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'http://{rest}' is not the address of a server")):
        checked_address(f"http://{rest}")


@pytest.mark.parametrize(
    "user", ["me:secret", "me:s@cret", "me:s/cret", "me:s?cret", "me:s#cret", "me:s[cret", "me:s cret", "secret"]
)
@pytest.mark.parametrize("rest", ["h", "h:99999", "h?version=2", "h:0/v1"])
def test_an_address_with_a_password_is_refused_and_the_password_not_shown(user: str, rest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'http://...@{rest}' has a password")) as caught:
        checked_address(f"http://{user}@{rest}")
    assert "cret" not in str(caught.value)


def test_each_address_in_a_text_is_shown_without_its_user() -> None:
    text = "override 1 (url=http://me:s cret@h:1/v1): url: 'http://...@h:1/v1' has a password; write http://h:1"
    assert hidden(text) == text.replace("me:s cret", "...")


URL = "http://me:secret@h"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Judge, {"model": "j", "url": URL}),
        (OpenEnv, {"url": "ws://me:secret@h"}),
        (NemoGym, {"path": "rows.jsonl", "servers": {"sums": URL}}),
        (NemoGym, {"path": "rows.jsonl", "agents": {"sums": URL}}),
        (NemoGym, {"path": "rows.jsonl", "head": URL}),
        (Remote, {"url": URL}),
        (RemoteConfig, {"urls": [URL]}),
        (TeacherServer, {"url": URL}),
        (MlflowSink, {"uri": URL}),
        (MlflowSink, {"uri": "postgresql://me:secret@h/curves"}),
        (TrackioSink, {"server": URL}),
        (CheckpointConfig, {"mirror": "sftp://me:secret@h/runs"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.__name__,
)
def test_settings_refuse_a_password_which_a_run_folder_would_show(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has a password") as caught:
        kind(**settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "quickstart", f"data.judge.url={URL}"],
        ["validate", "quickstart", f"generator={{type: remote, urls: [{URL}]}}"],
        ["train", f"{URL}/rows.jsonl"],
        ["resume", "sftp://me:secret@h/runs"],
        ["eval", f"{URL}/v1"],
        ["eval", "http://me:s#ecret@h/v1", "--on", "gsm8k"],
        ["eval", "quickstart", "--against", f"{URL}/v1#model"],
        ["gym", "nemo_gym", f"head={URL}", "path=rows.jsonl"],
    ],
    ids=" ".join,
)
def test_no_command_shows_a_password(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    shown = "".join(capsys.readouterr())
    assert "//...@h" in shown
    assert "ecret" not in shown


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://node_7", "http://[::1]:80/"])
def test_an_address_stays_as_it_is(url: str) -> None:
    assert checked_address(url) == url


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Judge, {"model": "j", "url": "http://h:99999"}),
        (OpenEnv, {"url": "ws://h:99999"}),
        (NemoGym, {"path": "rows.jsonl", "servers": {"sums": "http://h:99999"}}),
        (NemoGym, {"path": "rows.jsonl", "head": "http://h:99999"}),
        (Remote, {"url": "http://h:99999"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.__name__,
)
def test_settings_refuse_an_address_with_a_port_that_does_not_exist(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="h:99999' is not the address of a server: Port out of range"):
        kind(**settings)


@pytest.mark.parametrize("key", ["", "secret\n", "sec ret", "schlüssel"])
def test_a_key_that_no_header_may_hold_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ConfigError, match="MY_KEY is not a key") as caught:
        key_in("MY_KEY", "judge.api_key_env")
    assert not key or key not in str(caught.value)
    monkeypatch.setenv("MY_KEY", "sk-1_2.3=")
    assert key_in("MY_KEY", "judge.api_key_env") == "sk-1_2.3="
