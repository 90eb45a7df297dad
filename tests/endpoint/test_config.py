"""The address of an endpoint, TLS, and the limit on calls at the same time."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.endpoint.agents import RENDERER, scene
from tests.endpoint.certificates import certificate
from tests.endpoint.test_api import user
from whet.base.errors import ConfigError
from whet.config import Config
from whet.endpoint.config import EndpointConfig
from whet.endpoint.server import Endpoint
from whet.metrics.sinks.prometheus import PrometheusSink
from whet.shells.serving import ShellServer


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
        ({"host": "10.0.0.7"}, "endpoint.host = 10.0.0.7 is reached from other machines, which would send tokens"),
        ({"host": "node7"}, "set endpoint.certificate and endpoint.key"),
        ({"host": "0.0.0.0", "certificate": "a", "key": "b"}, "set endpoint.advertised"),
        ({"certificate": "a"}, "belong together"),
        ({"host": "0.0.0.0", "certificate": "a", "key": "b", "advertised": "node7"}, None),
    ],
    ids=str,
)
def test_an_address_beyond_this_machine_needs_a_certificate_and_a_name(
    settings: dict[str, Any], problem: str | None
) -> None:
    problems = list(EndpointConfig(**settings).problems())
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_clients_are_answered_over_tls_under_the_advertised_name(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)

    async def go() -> None:
        async with scene("ok") as at:
            config = EndpointConfig(advertised="localhost", certificate=str(made), key=str(key))
            secure = Endpoint(RENDERER, config)
            secure.start()
            try:
                with secure.open(at.conversations) as address:
                    assert address.base_url == f"https://localhost:{secure.port}/v1"
                    trust = ssl.create_default_context(cafile=str(made))
                    headers = {"authorization": f"Bearer {address.api_key}"}
                    async with httpx.AsyncClient(verify=trust, headers=headers, timeout=60) as client:
                        body = {"model": "m", "messages": [user("hi")]}
                        answer = await client.post(f"{address.base_url}/chat/completions", json=body)
                    assert answer.json()["choices"][0]["message"]["content"] == "ok"
            finally:
                await secure.close()

    asyncio.run(go())


def test_a_certificate_that_can_not_be_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("missing.pem", "empty.pem"):
        config = EndpointConfig(certificate=str(tmp_path / name), key=str(tmp_path / name))
        with pytest.raises(ConfigError, match=rf"can't use .*{name} with .* for TLS"):
            Endpoint(RENDERER, config).start()


def test_calls_above_the_limit_are_refused_until_one_has_ended() -> None:
    async def go() -> None:
        async with scene("ok", config=EndpointConfig(calls=2)) as at:
            at.model.gate.clear()
            waiting = [asyncio.create_task(at.chat(f"hi {i}")) for i in range(2)]
            while at.model.sampling < 2:
                await asyncio.sleep(0.01)
            refused = await at.chat("more")
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == "more than 2 calls of this episode at the same time"
            at.model.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
            assert (await at.chat("more")).status_code == 200
            assert at.conversations.refusals == 0, "this is not a budget of the episode"

    asyncio.run(go())


@pytest.mark.parametrize("settings", [EndpointConfig, ShellServer, PrometheusSink])
def test_no_host_is_not_every_address(settings: type[Config]) -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        settings(host="")  # as Python's sockets take it, all addresses of the machine
