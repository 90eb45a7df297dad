"""Parameters of Megatron Core as Hugging Face's: names, pieces over tensor-parallel ranks, and sums of gradients."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from whet.base.errors import WhetError
from whet.fetch.megatron_layout import join_heads, split_heads
from whet.models.shards import Parameters
from whet.parallel.megatron.families import BY_INPUTS, BY_OUTPUTS, NAMES, UNCUT
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import local

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER = re.compile(r"((?:base_model\.model\.)?)(model\.(?:\w+\.)?layers\.\d+\.)(.+)\.(\w+)")


def _within_layers(modules: Iterable[str], lora: str) -> str:
    """Return a pattern for modules of the decoder's layers, and for a matrix of LoRA of each part."""
    adapters = (f"{other}.{lora}" for module in modules for other in NAMES[module])
    return r"\.layers\.\d+\.(?:" + "|".join(map(re.escape, (*modules, *adapters))) + ")"


_ROWS = re.compile(_within_layers(BY_OUTPUTS, "lora_B") + "|embed_tokens|lm_head")
_COLUMNS = re.compile(_within_layers(BY_INPUTS, "lora_A"))


class GradientBuffers(Protocol):
    """Buffers in which the gradients of a step are added up; see ``DistributedAdamW``."""

    def accumulating(self) -> AbstractContextManager[None]: ...

    def reduce_scatter(self) -> None: ...


class MegatronParameters(Parameters):
    """Stored under Hugging Face's names, so that either learner reads what the other has saved."""

    def __init__(
        self, hf: "PretrainedConfig", ranks: Ranks | None, adapted: Collection[str] = (), tower: Iterable[str] = ()
    ) -> None:
        """``hf``: the config of the language model. ``adapted``: the Hugging Face modules with LoRA. ``tower``: the
        names of the vision tower's parameters."""
        self.ranks, self.adapted, self.tower = ranks, adapted, frozenset(tower)
        self.parts = 1 if ranks is None else ranks.config.tensor
        self.groups = hf.num_key_value_heads // self.parts
        self.heads = hf.num_attention_heads // hf.num_key_value_heads  # of queries, in a group
        self.buffers: GradientBuffers | None = None  # of the distributed optimizer

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        kind, slash, name = name.rpartition("/")
        names = self.names(name)
        pieces = self._split(name, local(tensor)) if tensor.dim() else [tensor.clone() for _ in names]
        return {
            kind + slash + other: self._spread(name, tensor, piece) for other, piece in zip(names, pieces, strict=True)
        }

    def restore(self, name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> None:
        kind, slash, name = name.rpartition("/")
        pieces = [local(stored[kind + slash + other]) for other in self.names(name)]
        with torch.no_grad():
            local(tensor).copy_(pieces[0] if tensor.dim() == 0 else self.joined(name, pieces))

    def names(self, name: str) -> list[str]:
        """Return the names of the Hugging Face tensors in Megatron Core's parameter ``name``."""
        if (matched := _LAYER.fullmatch(name)) is None or matched[3] not in NAMES:
            return [name]
        wrapper, layer, module, kind = matched.groups()
        modules = [layer + other for other in NAMES[module]]
        return [f"{wrapper}{m}.base_layer.{kind}" if m in self.adapted else f"{wrapper}{m}.{kind}" for m in modules]

    def own_piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a Hugging Face tensor of Megatron Core's parameter ``name``."""
        if self.ranks is None:
            return whole
        mesh, along, dim = self._layout(name)
        if dim is None or along not in (mesh.mesh_dim_names or ()):
            return whole
        return whole.chunk(mesh[along].size(), dim)[mesh.get_local_rank(along)]

    def joined(self, name: str, pieces: list[Tensor]) -> Tensor:
        """Return a parameter on this rank from its pieces: queries, keys and values by group; or gate and up."""
        return join_heads(pieces, self.groups) if "linear_qkv" in name else torch.cat(pieces)

    def _split(self, name: str, tensor: Tensor) -> list[Tensor]:
        if "linear_qkv" in name:
            return split_heads(tensor, self.groups, self.heads)
        return list(tensor.chunk(len(self.names(name))))

    def _layout(self, name: str) -> tuple[DeviceMesh, str, int | None]:
        """Return the mesh of the ranks that have a parameter, and the dimensions of the mesh and of the parameter along
        which it is cut. The other ranks of the mesh have copies."""
        assert self.ranks is not None
        if ".experts." in name:
            return self.ranks.experts(self.ranks.config.expert), "expert", 0
        return self.ranks.parameters, "tensor", _split_dim(name)

    def _spread(self, name: str, tensor: Tensor, piece: Tensor) -> Tensor:
        """Return the piece of ``tensor`` on this rank as a part of the whole Hugging Face tensor."""
        if self.ranks is None:
            return piece
        mesh, along, dim = self._layout(name)
        names, shape = mesh.mesh_dim_names or (), list(piece.shape)
        cut: dict[str, Placement] = {along: Replicate() if dim is None or piece.dim() == 0 else Shard(dim)}
        if isinstance(tensor, DTensor):  # FSDP's
            sharded = tensor.placements[-1]
            assert isinstance(sharded, Shard)
            cut |= {names[-2] if along in names else names[-1]: sharded}
            shape[sharded.dim] = tensor.shape[sharded.dim]
        if dim is not None and piece.dim() and along in names:
            shape[dim] *= mesh[along].size()
        placements = [cut.get(size, Replicate()) for size in names]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.buffers is None else self.buffers.accumulating()

    def gradients(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        parts = super().gradients(name, parameter)
        return parts if self.buffers is None else {other: self._shares(name, part) for other, part in parts.items()}

    def _shares(self, name: str, part: Tensor) -> Tensor:
        """Return a gradient of the distributed optimizer, which is zero on each rank but in the rank's share."""
        assert isinstance(part, DTensor)
        mesh, along, _ = self._layout(name)
        placements = [
            Partial() if size not in (along, "replicas") else placement
            for size, placement in zip(mesh.mesh_dim_names or (), part.placements, strict=True)
        ]
        return DTensor.from_local(
            local(part), mesh, placements, run_check=False, shape=part.shape, stride=part.stride()
        )

    def sum_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        if self.ranks is None:
            return
        for name, parameter in named:
            if parameter.grad is None:
                continue
            mesh, along, _ = self._layout(name)
            summed = self.buffers is not None or isinstance(parameter, DTensor)  # over data, by FSDP or the buffers
            for size in mesh.mesh_dim_names or ():
                if mesh[size].size() > 1 and (self._of_some_tokens(name) if size == along else not summed):
                    dist.all_reduce(local(parameter.grad), group=mesh.get_group(size))
        if self.buffers is not None:
            self.buffers.reduce_scatter()

    def _of_some_tokens(self, name: str) -> bool:
        """Return whether each tensor-parallel rank has applied a whole parameter to its heads or tokens only."""
        assert self.ranks is not None
        if name in self.tower:  # in which names such as "q_layernorm" say nothing
            return self.ranks.config.sequence_parallel
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
        among = any(kind in name for kind in ("norm", "router", "lora_", *UNCUT)) and _split_dim(name) is None
        return self.ranks.config.sequence_parallel and among


def stays_whole(name: str) -> bool:
    """Return whether a parameter, which is small, is not sharded over the data: LoRA, and joined biases."""
    return "lora_" in name or name.endswith("linear_qkv.bias")


def shard_dim(name: str, parameter: Tensor, ranks: int) -> int:
    """Return the dimension along which FSDP shards a parameter over ``ranks``: another one than tensor or expert
    parallelism and Hugging Face's names split. Raises ``WhetError`` if FSDP can't shard it evenly, where it has to."""
    split = 0 if ".experts." in name else _split_dim(name)
    candidates = [dim for dim in range(parameter.dim()) if dim != split]
    for dim in candidates:
        if dim == 0 or parameter.shape[dim] % ranks == 0:
            return dim
    raise WhetError(
        f"parallel.fsdp x context = {ranks} does not divide a size of {name}, {list(parameter.shape)}, such as the "
        "hidden size; choose other sizes"
    )


def _split_dim(name: str) -> int | None:
    """Return the dimension over which tensor parallelism splits a parameter."""
    if _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None
