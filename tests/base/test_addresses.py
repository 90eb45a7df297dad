"""Addresses and keys that can't work are refused before they are used, and keys are never shown."""

import re
from typing import Any

import pytest

from whet.base.addresses import checked_address, key_in
from whet.base.errors import ConfigError
from whet.shells.remote import Remote
from whet.tasks.adapters.openenv import OpenEnv
from whet.tasks.gym.tasks import NemoGym
from whet.tasks.judges.config import Judge

WRONG = ["127.0.0.1:99999/v1", "127.0.0.1:x", "[::1/v1", "", "a b/v1", "a/v1#model", "a/v1?version=2", ":80"]


@pytest.mark.parametrize("rest", WRONG)
def test_an_address_that_can_not_be_reached_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'http://{rest}' is not the address of a server")):
        checked_address(f"http://{rest}")


@pytest.mark.parametrize("rest", ["h:99999", "h?version=2", "h:0/v1"])
def test_a_password_in_a_wrong_address_is_not_shown(rest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'http://...@{rest}' is not the address of a server")):
        checked_address(f"http://me:s@cret@{rest}")


@pytest.mark.parametrize("password", ["s/cret", "s?cret", "s#cret", "s[cret"])
def test_no_piece_of_a_password_is_taken_for_a_port_and_shown(password: str) -> None:
    with pytest.raises(ValueError, match=r"^'http://...@h:80/v1' is not .* are written %2F, %3F, %23 and %5B$"):
        checked_address(f"http://me:{password}@h:80/v1")
    with pytest.raises(ValueError, match=r"server: Port out of range 0-65535$"):
        checked_address("http://me:secret@h:99999/v1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://node_7", "http://[::1]:80/", "http://a:b@c/v1"])
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
