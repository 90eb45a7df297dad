"""Servers of vLLM that are killed while a run samples on them, and started again: the run continues on the other one,
and its ledger counts each prompt once."""

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.e2e.test_kills import ends_exactly, lines, wait_for, whet
from tests.toy import toy_recipe, write_recipe
from tests.vllm_server import Vllm
from whet.metrics.sinks.jsonl import FILE, read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def serves(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until a server has weights of the run, or the run has ended."""
    deadline = time.monotonic() + 300
    label = ""
    while not label.startswith("whet-") and process.poll() is None:
        assert time.monotonic() < deadline, f"{url} was not taken in again"
        time.sleep(0.1)
        with urllib.request.urlopen(f"{url}/weight_info", timeout=60) as answer:
            label = json.load(answer)["weight_version"]


def test_a_server_of_vllm_is_killed_and_replaced_in_the_middle_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    servers: list[Vllm] = []
    try:
        servers.extend(Vllm(tiny_model, tmp_path / f"log-{number}.txt") for number in range(2))
        recipe = toy_recipe(
            tiny_model,
            steps=100_000,
            data={"type": "tests.e2e.test_kills:Twice", "size": 7},
            algorithm={"type": "grpo", "group_size": 2},
            sampling={"max_turns": 2, "max_observation_tokens": 32, "max_episode_tokens": 192},
            rollouts={"prompts_per_step": 2, "max_staleness": 2, "order": "ready"},
            evaluation={"enabled": False},
            generator={
                "type": "remote",
                "urls": [server.url for server in servers],
                "folder": str(tmp_path),
                "dtype": "float32",
                "max_context": 256,
                "max_batch": 16,
                "deadline": 120.0,
            },
        )
        run = tmp_path / "run"
        process = whet("train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run))
        try:
            for number, server in enumerate(list(servers)):
                wait_for(process, run, lines(run) + 6)  # three steps, so that both servers serve
                server.kill()
                servers[number] = Vllm(tiny_model, tmp_path / f"log-{number}.txt", port=server.port)
                serves(server.url, process)
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
