"""The output matrix, split by vocabulary over the ranks of tensor parallelism. Independent of the model."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.models.shards import Vocabulary


class SpreadVocabulary(Vocabulary):
    """``Vocabulary`` over a one-dimensional mesh, in pieces of equal size except for the last ones."""

    def __init__(self, mesh: DeviceMesh, words: int) -> None:
        self.group, self.words = mesh.get_group(), words
        self.piece = -(-words // mesh.size())
        self.start = min(self.piece * mesh.get_local_rank(), words)

    def local(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, DTensor)
        return weight.to_local()

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def all_gather(self, logits: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(logits, (0, self.piece - logits.shape[1]), value=float("-inf"))
        parts = [torch.empty_like(padded) for _ in range(self.group.size())]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts, 1)[:, : self.words]
