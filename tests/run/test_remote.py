"""Whole runs that sample on servers that are already running: doubles of them (``tests.engines.server_double``)."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.server_double import Running, doubles
from tests.toy import toy_recipe
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run
from whet.run.recipe import Recipe


def remote(servers: list[Running], protocol: str, **changes: Any) -> dict[str, Any]:
    urls = [server.url for server in servers]
    return {"type": "remote", "urls": urls, "protocol": protocol, "max_batch": 64, **changes}


def recipe(model: Path, generator: dict[str, Any], **changes: Any) -> Recipe:
    return toy_recipe(model, generator=generator, **{"evaluation": {"limit": 2}, **changes})


def trained(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train" and line["step"]]


@pytest.mark.parametrize("protocol", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_recipe_trains_on_two_servers_and_every_refit_is_proven(
    tiny_model: Path, tmp_path: Path, protocol: str, max_staleness: int
) -> None:
    with doubles(protocol, tiny_model, 2) as servers:
        rollouts = {"max_staleness": max_staleness}
        settings = recipe(tiny_model, remote(servers, protocol, folder=str(tmp_path)), steps=3, rollouts=rollouts)
        steps = trained(run.start(settings, tmp_path / "run"))
    assert len(steps) == 3
    assert all(0 <= line["refit/probe_mean"] < 1e-4 for line in steps)
    assert all(line["mismatch/token_mult_prob_error"] < 1.001 for line in steps if not max_staleness)
    assert not list(tmp_path.glob("whet-tmp-*"))
