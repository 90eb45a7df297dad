"""A teacher behind a server of vLLM, against the same teacher as a model of the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.distillation.test_ask import LOSS, launched
from tests.distillation.test_server import asked, checked, taught
from tests.e2e.test_distillation import on_policy
from tests.e2e.test_learning import lines
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.vllm_server import Vllm
from whet.base.errors import ConfigError
from whet.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("student", "blue")}
    for name, seed, rows in (("student", 0, 264), ("blue", 2, 272)):
        tiny_llama(rows, seed=seed, initializer_range=0.3).save_pretrained(made[name])
        tiny_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    server = Vllm(folders["blue"], tmp_path_factory.mktemp("log") / "log.txt", "--max-logprobs", "32")
    yield server
    server.close()


@pytest.mark.parametrize("settings", [{"k": 5}, {"k": 24}, LOSS], ids=["few", "many", "sampled"])
def test_a_server_of_vllm_says_what_the_same_teacher_says_as_a_model_of_the_run(
    settings: dict[str, Any], folders: dict[str, Path], server: Vllm
) -> None:
    student, teacher = launched(folders["student"], trained=True), launched(folders["blue"])
    far = asked(taught(folders["blue"], {"url": server.url}, **settings), student, None)
    near = asked(taught(folders["blue"], None, **settings), student, teacher)
    if "k" in settings:
        assert torch.equal(far.column("topk_ids"), near.column("topk_ids"))
    name = "teacher_logprobs" if "k" in settings else "teacher_token_logprobs"
    torch.testing.assert_close(far.column(name).double(), near.column(name).double(), atol=1e-3, rtol=0)
    assert far.column(name)[far.trained].any()


def test_a_run_learns_from_a_server_of_vllm_what_it_learns_from_the_same_model(
    folders: dict[str, Path], server: Vllm, tmp_path: Path
) -> None:
    seen = {}
    for name, address in (("near", None), ("far", {"url": server.url})):
        algorithm = {"k": 8, "teachers": {"tutor": {"path": str(folders["blue"]), "server": address}}}
        folder = run.start(on_policy(folders["student"], folders["blue"], 3, algorithm), tmp_path / name)
        seen[name] = [line["distillation/forward_kl"] for line in lines(folder, "train")[1:]]
    assert len(seen["far"]) == 3
    assert seen["far"] == pytest.approx(seen["near"], rel=1e-2)


def test_a_server_of_vllm_that_does_not_fit_is_refused(folders: dict[str, Path], server: Vllm, tmp_path: Path) -> None:
    address = {"url": server.url}
    checked(folders, folders["blue"], address, k=5)
    with pytest.raises(ConfigError, match="vllm serve MODEL --max-logprobs 33"):
        checked(folders, folders["blue"], address, k=25)
    with pytest.raises(ConfigError, match=r"serves a model with more tokens than .*, which has 264"):
        checked(folders, folders["student"], address, k=5)
    with pytest.raises(ConfigError, match=r"takes at most 512 tokens .* fewer than sampling.max_prompt_tokens"):
        checked(folders, folders["blue"], address, longest=512, k=5)
    tiny_llama(280).save_pretrained(tmp_path / "longer")
    tiny_tokenizer().save_pretrained(tmp_path / "longer")
    with pytest.raises(ConfigError, match="gives no log-probs of a prompt with the last of the 280 tokens"):
        checked(folders, tmp_path / "longer", address, **LOSS)
