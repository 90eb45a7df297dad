"""A server of vLLM, started as a user starts it, as the engine of a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.contracts.engine_contract import EngineContract
from tests.engines.test_server_generator import ServerContract
from tests.run.test_remote import recipe, trained
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.toy import save_tiny_model
from tests.vllm_server import Vllm
from whet.run import run as runs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class TestServerOfVllm(ServerContract):
    held = staticmethod(EngineContract.held)  # type: ignore[assignment]  # a real server can not be held
    long = 480

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
        folder = tmp_path_factory.mktemp("model")
        tiny_llama(initializer_range=0.3).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        server = Vllm(folder, folder / "log.txt")
        yield server
        server.close()


def test_a_recipe_trains_on_a_server_of_vllm_and_every_refit_is_proven(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    server = Vllm(model, tmp_path / "log.txt")
    try:
        generator = {"type": "remote", "urls": [server.url], "folder": str(tmp_path), "max_batch": 64}
        steps = trained(runs.start(recipe(model, generator, steps=3), tmp_path / "run"))
    finally:
        server.close()
    assert len(steps) == 3
    assert all(0 <= line["refit/probe_mean"] < 1e-3 for line in steps)
    assert all(line["mismatch/token_mult_prob_error"] < 1.01 for line in steps)
    assert not list(tmp_path.glob("whet-tmp-*"))
