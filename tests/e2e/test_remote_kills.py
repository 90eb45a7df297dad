"""Killed again and again, servers of which a run samples and the run itself lose no prompt and count none twice."""

import json
import os
import random
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.test_kills import ends_exactly, lines, wait_for, whet
from tests.engines.server_double import Running
from tests.toy import toy_recipe, write_recipe
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.rollouts.audit import audit
from whet.run.recipe import Recipe

LABELS = {"vllm": "/weight_info", "sglang": "/get_model_info"}
KILLS = int(os.environ.get("WHET_TEST_KILLS", "8"))


def serves(labels: str, process: subprocess.Popen[str]) -> None:
    """Wait until a server, which tells the label of its weights at ``labels``, has weights of the run, or the run has
    ended."""
    deadline = time.monotonic() + 300
    label = ""
    while not label.startswith("whet-") and process.poll() is None:
        assert time.monotonic() < deadline, f"{labels}: the server was not taken in again"
        time.sleep(0.1)
        with urllib.request.urlopen(labels, timeout=60) as answer:
            label = json.load(answer)["weight_version"]


def remote_recipe(model: Path, folder: Path, urls: list[str], **generator: object) -> Recipe:
    """Return a recipe that samples two turns from servers, asynchronously."""
    return toy_recipe(
        model,
        steps=100_000,
        data={"type": "tests.e2e.test_kills:Twice", "size": 7},
        algorithm={"type": "grpo", "group_size": 2},
        sampling={"max_turns": 2, "max_observation_tokens": 32, "max_episode_tokens": 192},
        rollouts={"prompts_per_step": 2, "max_staleness": 2, "order": "ready"},
        evaluation={"enabled": False},
        generator={
            "type": "remote",
            "urls": urls,
            "folder": str(folder),
            "dtype": "float32",
            "max_context": 256,
            "max_batch": 16,
            **generator,
        },
    )


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_kills_of_servers_and_of_runs_leave_the_ledger_exact(protocol: str, tiny_model: Path, tmp_path: Path) -> None:
    servers = [Running(protocol, tiny_model) for _ in range(2)]
    recipe = remote_recipe(tiny_model, tmp_path, [server.url for server in servers], protocol=protocol, deadline=60.0)
    recipe = recipe.model_copy(update={"checkpoints": CheckpointConfig(every=1, asynchronous=True)})
    run, dice = tmp_path / "run", random.Random(7)
    command = ["train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run)]
    process = whet(*command)
    try:
        for _ in range(KILLS):
            wait_for(process, run, lines(run) + 2)
            assert process.poll() is None, process.communicate()[1]
            time.sleep(dice.uniform(0, 1))
            victim = dice.choice([0, 1, None])
            if victim is None:
                process.kill()
                process.communicate(timeout=60)
                assert not CheckpointStore(run / "checkpoints").steps() or not audit(run).violations
                process = whet("resume", str(run)) if (run / "recipe.yaml").exists() else whet(*command)
            else:
                servers[victim].kill()
                wait_for(process, run, lines(run) + 2)  # on the other one
                servers[victim] = Running(protocol, tiny_model, servers[victim].port)
                serves(servers[victim].url + LABELS[protocol], process)
        process.kill()
        process.communicate(timeout=60)
        ends_exactly(run)
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.kill()
