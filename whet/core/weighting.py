"""The weights of tokens in an optimizer step, from counts over the whole step. Losses are normalised nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.base.lazy import Tensor, torch
from whet.core.types import Weighting

if TYPE_CHECKING:
    from whet.core.batch import Batch


def shares(batch: Batch, weighting: Weighting, divisor: int | None = None) -> Tensor:
    """Return the weight of each trained token of a sequence; ``batch`` is a whole step's. Episodes and groups without
    a trained token are not counted. [S] float64

    ``token``: 1 / trained tokens (DAPO, arXiv 2503.14476). ``sequence``: 1 / (episodes x the episode's trained tokens)
    (GRPO, arXiv 2402.03300). ``group``: 1 / (groups x the group's trained tokens). ``constant``: 1 / (episodes x
    ``divisor``) (Dr. GRPO, arXiv 2503.20783). Raises ``ValueError`` for another weighting or a missing divisor.
    """
    per_sequence = batch.trained_per_sequence.double()
    per_episode = batch.per_episode(per_sequence)
    episodes = ((per_episode > 0) & batch.first_branch).sum().clamp(min=1)
    if weighting == "token":
        return torch.ones_like(per_sequence) / per_sequence.sum().clamp(min=1)
    if weighting == "sequence":
        return 1.0 / (episodes * per_episode.clamp(min=1))
    if weighting == "group":
        per_group = torch.zeros(len(batch.group_uids), dtype=torch.float64).index_add(0, batch.group, per_sequence)
        groups = (per_group > 0).sum().clamp(min=1)
        return 1.0 / (groups * per_group.clamp(min=1)[batch.group])
    if weighting != "constant":
        raise ValueError(f"weighting is 'token', 'sequence', 'group' or 'constant', not {weighting!r}")
    if not divisor:
        raise ValueError("weighting 'constant' needs a divisor (the longest possible answer, in tokens)")
    return torch.ones_like(per_sequence) / (episodes * divisor)
