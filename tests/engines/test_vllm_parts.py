"""The part of a tensor on each rank of a vLLM engine, compared with vLLM's own layers and loaders. No engine runs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from whet.engines.vllm.model import VllmModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WIDTH, HEAD = 24, 8


class Layers(nn.Module):
    """A layer of each kind, as vLLM builds it on one rank. ``fused`` comes in one piece, as Phi-3's does."""

    def __init__(self, key_values: int) -> None:
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        super().__init__()
        self.qkv_proj = linear.QKVParallelLinear(WIDTH, HEAD, 4, key_values, bias=True)
        self.fused = linear.QKVParallelLinear(WIDTH, HEAD, 4, key_values, bias=True)
        self.gate_up_proj = linear.MergedColumnParallelLinear(WIDTH, [16, 16], bias=True)
        self.column = linear.ColumnParallelLinear(WIDTH, 16, bias=True)
        self.row = linear.RowParallelLinear(WIDTH, 16, bias=True)
        self.whole = linear.ReplicatedLinear(WIDTH, 16, bias=True)
        self.embedding = VocabParallelEmbedding(150, WIDTH)  # fills up to 192: with 4 ranks the last has padding alone
        self.norm = nn.Linear(WIDTH, 1, bias=False)

    def given(self, key_values: int) -> Iterator[tuple[str, Any, tuple[Any, ...], Tensor]]:
        """Yield (Hugging Face name, vLLM's parameter, further arguments of its loader, tensor) of every weight."""
        rows = {"q": 4 * HEAD, "k": key_values * HEAD, "v": key_values * HEAD}
        for kind, more in (("weight", (WIDTH,)), ("bias", ())):
            for which, count in rows.items():
                yield f"{which}_proj.{kind}", getattr(self.qkv_proj, kind), (which,), _numbers(count, *more)
            for place, which in enumerate(("gate", "up")):
                yield f"{which}_proj.{kind}", getattr(self.gate_up_proj, kind), (place,), _numbers(16, *more)
            yield f"fused.{kind}", getattr(self.fused, kind), (), _numbers(sum(rows.values()), *more)
            for name in ("column", "row", "whole"):
                yield f"{name}.{kind}", getattr(getattr(self, name), kind), (), _numbers(16, *more)
        yield "embedding.weight", self.embedding.weight, (), _numbers(150, WIDTH)


def _numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def _on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: ranks)


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers


def _model(layers: nn.Module, ranks: int) -> VllmModel:
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: Model(layers)),
        model_config=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks)),
    )
    return VllmModel(worker)


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("key_values", [1, 2, 4])
def test_a_ranks_part_is_what_vllms_own_loader_takes(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, key_values: int
) -> None:
    _on_rank(monkeypatch, rank, ranks)
    layers = Layers(key_values)
    model = _model(layers, ranks)
    for name, parameter, told, tensor in layers.given(key_values):
        part = model.shard(f"layers.{name}", tensor)
        assert part is not None, name
        parameter.data.zero_()
        parameter.weight_loader(parameter, tensor, *told)
        loaded = parameter.data.flatten()
        assert torch.equal(loaded[loaded != 0], part.flatten()), name


def test_what_vllm_may_cut_in_another_way_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    class Unknown(ColumnParallelLinear):
        pass

    _on_rank(monkeypatch, 1, 2)
    layers = nn.Module()
    layers.unknown = Unknown(WIDTH, 16)
    layers.loaded = ColumnParallelLinear(WIDTH, 16)
    layers.loaded.weight.weight_loader = lambda parameter, tensor: None  # a model's own, as mixers of states have
    layers.norm = nn.Linear(8, 4)
    model = _model(layers, 2)
    assert model.shard("layers.unknown.weight", _numbers(16, WIDTH)) is None
    assert model.shard("layers.loaded.weight", _numbers(16, WIDTH)) is None
    assert model.shard("layers.norm.weight", _numbers(8, 8)) is None  # split in an unknown way
    assert model.shard("layers.norm.weight", _numbers(4, 8)) is not None
    assert model.shard("layers.nowhere.weight", _numbers(4, 8)) is None
    alone = _model(layers, 1)
    assert (
        alone.shard("layers.norm.weight", _numbers(8, 8)) is not None
    )  # with one rank a wrong size is an error, not unverified
