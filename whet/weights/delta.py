"""The difference between a bucket of weights and the bucket before it: the elements whose bits changed, by their
positions. After a step of a small learning rate most weights in bfloat16 round to the same bits, so the difference is a
small part of the bucket. The receiver puts it into its copy of the bucket before, whose digests then prove all of it.

A payload is bytes: the positions (int32), then the new elements.
"""

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.weights.digest import BITS

_POSITION = torch.int32.itemsize


def difference(new: Tensor, old: Tensor, itemsize: int) -> Tensor | None:
    """Return the payload that makes ``new`` of ``old``, both [bytes] (uint8) of elements of ``itemsize`` bytes; None
    if it would not be smaller than ``new``."""
    lanes, before = new.view(BITS[itemsize]), old.view(BITS[itemsize])
    if len(lanes) > torch.iinfo(torch.int32).max:
        return None
    changed = (lanes != before).nonzero()[:, 0]
    if len(changed) * (_POSITION + itemsize) >= len(new):
        return None
    return torch.cat([changed.to(torch.int32).view(torch.uint8), lanes[changed].view(torch.uint8)])


def apply(payload: Tensor, memory: Tensor, itemsize: int) -> None:
    """Put the elements of a payload [bytes] into ``memory`` [bytes]. Raises ``RefitError`` if they don't fit."""
    count, rest = divmod(len(payload), _POSITION + itemsize)
    positions = payload[: count * _POSITION].view(torch.int32)
    lanes = memory.view(BITS[itemsize])
    if rest or (count and not 0 <= int(positions.min()) <= int(positions.max()) < len(lanes)):
        raise RefitError("the changed weights that arrived don't fit the weights that the engine has")
    lanes[positions.long()] = payload[count * _POSITION :].clone().view(lanes.dtype)
