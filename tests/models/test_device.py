"""Code that differs by device, tested without a GPU: on ``meta``, where nothing is computed, or with fakes of torch."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny import tiny_llama
from whet.base.errors import ConfigError
from whet.engines.torch import prefix
from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.prefix import Prefix
from whet.engines.torch.tiles import BLOCK
from whet.models import device
from whet.models.attention import forest as forest_attention
from whet.models.attention.dense import AttentionSettings, fused_attention
from whet.models.attention.forest import NAME, use_forest_attention
from whet.models.attention.layout import ForestLayout
from whet.models.tiled_logprobs import tiles_on

META = torch.device("meta")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Two GPUs, as far as torch says; what is chosen is written down."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield chosen
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_rank_takes_a_gpu_of_its_own_unless_told_otherwise(gpus: list[torch.device]) -> None:
    assert [str(device.choose_device("auto", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert gpus == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    assert device.choose_device("cpu").type == "cpu"


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    assert device.choose_device().type == "cpu"
    with pytest.raises(ConfigError, match=r"learner\.device = cuda, but this process sees no GPU"):
        device.choose_device("cuda")


@pytest.mark.parametrize(("cuda", "why"), [(None, "is built without CUDA"), ("13.0", "older than its CUDA 13.0")])
def test_gpus_that_torch_can_not_use_are_an_error_or_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, why: str
) -> None:
    monkeypatch.setattr(device, "_GPUS", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device.unused_gpus() is None
    (tmp_path / "nvidia0").touch()
    assert why in (device.unused_gpus() or "")
    with pytest.raises(ConfigError, match=rf"sees no GPU \(torch .*{why}"):
        device.choose_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.unused_gpus() is None, "they are hidden"


def test_attention_that_plans_for_each_shape_is_off(gpus: list[torch.device]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.choose_device()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_determinism_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        device.be_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "masked", "grouped"),
    [
        (torch.float32, False, False),  # else a kernel that keeps the scores of all heads
        (torch.float32, True, False),
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, True),
    ],
)
@pytest.mark.parametrize("caller", ["learning", "sampling"])
def test_heads_that_share_keys_go_to_a_kernel_that_is_fast_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caller: str, dtype: torch.dtype, masked: bool, grouped: bool
) -> None:
    asked: dict[str, Any] = {}

    def kernel(q: Tensor, k: Tensor, *_: Any, **settings: Any) -> Tensor:
        asked.update(settings, heads=k.shape[1])
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    q, k = torch.empty(1, 8, 32, 16, device=META, dtype=dtype), torch.empty(1, 2, 32, 16, device=META, dtype=dtype)
    settings = AttentionSettings(0.25, window=4 if masked else None)
    if caller == "sampling":
        prefix._causal(q[0], (k[0],), (k[0],), settings)
    else:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        forest_attention._attend(q, k, k, ForestLayout.of_lengths([32], META), 0, settings, 0.0)
    assert asked["enable_gqa"] == grouped
    assert asked["heads"] == (2 if grouped else 8)


def test_repeated_heads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    repeated = (x.repeat_interleave(4, 1) for x in (k, v))
    torch.testing.assert_close(fused_attention(q, k, v, None, 0.25), fused_attention(q, *repeated, None, 0.25))


def test_the_head_works_on_more_at_once_on_a_gpu() -> None:
    cpu, gpu = tiles_on(torch.device("cpu")), tiles_on(torch.device("cuda"))
    assert (cpu.tokens, cpu.words, cpu.sorted) == (1024, 2048, 128)
    launches = [-(-7000 // tiles.tokens) * -(-151_936 // tiles.words) for tiles in (cpu, gpu)]
    assert launches[1] * 20 < launches[0]
    assert 4 * gpu.tokens * gpu.words <= 2**28, "bytes of a float32 buffer"


@pytest.mark.parametrize(("where", "sizes"), [("cpu", 32), ("meta", 6)])
def test_a_gpus_cache_grows_by_doubling(where: str, sizes: int) -> None:
    """A device whose allocator keeps every size that was once requested."""
    place = torch.device(where)
    cache = DecodeCache(1, place)
    one = [(torch.empty(1, 4, 2, device=place),)]
    cache.prefixes, seen = [Prefix(4, one, one)], []
    for needed in range(1, 32 * BLOCK + 1):
        cache._fit_span(needed)
        assert cache.span >= needed
        seen.append(cache.span)
    assert len(set(seen)) == sizes
    cache._fit_span(2 * BLOCK + 1)
    assert cache.span == 3 * BLOCK, "and shrinks to what is needed"


def test_transformers_does_not_look_at_positions_for_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that would wait for the GPU in each micro-batch."""
    import transformers.masking_utils as masking

    def looks(*_: Any, **__: Any) -> None:
        raise AssertionError("positions were looked at")

    monkeypatch.setattr(masking, "find_packed_sequence_indices", looks)
    model = tiny_llama()
    use_forest_attention(model)
    assert model.config._attn_implementation == NAME
    tokens = torch.arange(6)[None]
    model(tokens, position_ids=tokens, use_cache=False, whet_forest=ForestLayout.of_lengths([6], "cpu"))
