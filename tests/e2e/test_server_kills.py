"""Servers of vLLM that are killed while a run samples on them, and started again: the run continues on the other one,
and its ledger counts each prompt once."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.e2e.test_kills import ends_exactly, lines, wait_for, whet
from tests.e2e.test_remote_kills import remote_recipe, serves
from tests.toy import write_recipe
from tests.vllm_server import Vllm
from whet.metrics.sinks.jsonl import FILE, read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_a_server_of_vllm_is_killed_and_replaced_in_the_middle_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    servers: list[Vllm] = []
    try:
        servers.extend(Vllm(tiny_model, tmp_path / f"log-{number}.txt") for number in range(2))
        recipe = remote_recipe(tiny_model, tmp_path, [server.url for server in servers], deadline=120.0)
        run = tmp_path / "run"
        process = whet("train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run))
        try:
            for number, server in enumerate(list(servers)):
                wait_for(process, run, lines(run) + 6)  # three steps, so that both servers serve
                server.kill()
                servers[number] = Vllm(tiny_model, tmp_path / f"log-{number}.txt", port=server.port)
                serves(f"{server.url}/weight_info", process)
                assert process.poll() is None, process.communicate()[1]
            wait_for(process, run, lines(run) + 5)
            assert process.poll() is None, process.communicate()[1]
        finally:
            process.kill()
            process.communicate()
        ends_exactly(run)
        assert sum(line.get("generator/lost", 0) for line in read_metrics(run / FILE)) >= 2
    finally:
        for server in servers:
            server.close()
