"""Images for a server of vLLM, started as a user starts it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.engines.test_server_images import ServerWithImages, learned
from tests.tiny_vision import save_tiny_vision
from tests.vllm_server import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[list[Vllm]]:
    server = Vllm(folder, folder / "log.txt", *options)
    try:
        yield [server]
    finally:
        server.close()


class TestIdefics3(ServerWithImages):
    family = "idefics3"
    serve = served


class TestSmolVlm(ServerWithImages):
    family = "smolvlm"
    serve = served


class TestInternVL(ServerWithImages):
    family = "internvl"
    serve = served


class TestGemma3(ServerWithImages):
    family = "gemma3"

    @staticmethod
    def serve(folder: Path) -> AbstractContextManager[list[Vllm]]:
        return served(folder, "--no-enable-chunked-prefill")


class TestGemma4(TestGemma3):
    family = "gemma4"


class TestQwen25VL(ServerWithImages):
    family = "qwen2_5_vl"
    serve = served


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="the instructions of AVX-512 for bfloat16 are missing"
)
class TestQwen35(ServerWithImages):
    family = "qwen3_5"
    dtype = "bfloat16"
    tolerance = 0.02

    @staticmethod
    def serve(folder: Path) -> AbstractContextManager[list[Vllm]]:
        return served(folder, "--dtype", "bfloat16", "--no-enable-prefix-caching")


class TestQwen3VL(ServerWithImages):
    family = "qwen3_vl"
    serve = served


def test_a_run_learns_on_images_that_a_server_sampled_from(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "model", "qwen2_5_vl", wide=True)
    with served(tmp_path / "model") as (server,):
        lines = learned(tmp_path / "model", server, tmp_path)
    assert len(lines) == 2
    assert all(0 <= line["refit/probe_mean"] < 1e-3 for line in lines)
    assert all(line["mismatch/token_mult_prob_error"] < 1.01 for line in lines)
