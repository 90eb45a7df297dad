"""The two narrow waists: ``Batch``, what a model is trained on, and ``ModelOutput``, what a model says about it.

A batch is a forest of segments. A segment is a run of tokens with a parent segment or none. A token attends to all
tokens of its ancestors and causally within its own segment; its position continues its parent's. Sixteen answers to
one prompt are one prompt segment with sixteen children, computed once. Trained tokens belong to exactly one sequence;
only untrained tokens are shared.

Nothing here knows a model, a device mesh or an algorithm. Shapes: N tokens, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from whet.errors import DataError
from whet.seeds import derive_seed
from whet.types import Distribution, Group, Status, Trajectory, Weighting

MIN_COMMON_PREFIX = 16  # tokens; below this, one more level of attention costs more than it saves

_TOKEN = {"axis": "token"}
_SEQUENCE = {"axis": "sequence"}


@dataclass(slots=True)
class ModelOutput:
    """What a model says about a batch: float32 (float64 models: float64), the same on every rank holding the tokens."""

    logprobs: Tensor  # [N]; of each trained token under the batch's distribution, 0 elsewhere
    entropy: Tensor | None = None  # [N]; of the distribution that predicts each trained token, 0 elsewhere
    values: Tensor | None = None  # [N]; of a scalar head, at each trained token's predictor
    topk: Tensor | None = None  # [N, K]; log-probs of the ids in the batch's teacher columns


@dataclass(slots=True)
class Batch:
    """Packed tokens with everything a loss may ask for. Optional columns are filled as the algorithm needs them."""

    tokens: Tensor = field(metadata=_TOKEN)  # [N] int64
    position: Tensor = field(metadata=_TOKEN)  # [N] int64
    predictor: Tensor = field(metadata=_TOKEN)  # [N] int64; the token that predicts it, -1: none
    sequence: Tensor = field(metadata=_TOKEN)  # [N] int64; -1 where shared
    trained: Tensor = field(metadata=_TOKEN)  # [N] bool
    segment_start: Tensor  # [segments] int64, ascending; a segment ends where the next one starts
    segment_parent: Tensor  # [segments] int64; -1 for a root; parents stand before their children
    group: Tensor = field(metadata=_SEQUENCE)  # [S] int64, index into group_uids
    reward: Tensor = field(metadata=_SEQUENCE)  # [S] float64
    truncated: Tensor = field(metadata=_SEQUENCE)  # [S] bool
    group_uids: tuple[str, ...] = ()
    distribution: Distribution = field(default_factory=Distribution)  # what log-probs are taken under
    scores: dict[str, Tensor] = field(default_factory=dict)  # [S] float64 each; nan where a sequence lacks the score
    weight: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float64; share of the optimizer step
    rollout_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float32, as sampled
    old_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    reference_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    values: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    advantages: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    returns: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    reward_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]; of an implicit reward model
    reward_reference_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]; of its frozen start
    teacher_ids: Tensor | None = field(default=None, metadata=_TOKEN)  # [N, K] int64
    teacher_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N, K]
    teacher_token_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]; of the tokens themselves

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], *, share_prompts: bool = True, distribution: Distribution | None = None
    ) -> "Batch":
        """Lay out the trajectories of the groups, in order. What all trajectories of a group have in common before the
        first trained token becomes one shared segment; so does what all groups have in common (a system prompt, say),
        if it is long enough to be worth it. ``share_prompts=False`` makes every trajectory a root.

        Raises ``DataError`` for a failed trajectory or one without tokens.
        """
        layout = _Layout()
        prompts = [_same_start([_leading(t) for t in group.trajectories]) for group in groups]
        common = _same_start(prompts) if share_prompts and len(groups) > 1 else []
        root = layout.shared_segment(common, parent=-1) if len(common) >= MIN_COMMON_PREFIX else -1
        for index, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
            parent, shared = root, len(common) if root >= 0 else 0
            if share_prompts and len(group.trajectories) > 1 and len(prompt) > shared:
                parent, shared = layout.shared_segment(prompt[shared:], parent), len(prompt)
            for trajectory in group.trajectories:
                layout.add_sequence(group.uid, index, trajectory, parent, shared)
        return layout.batch(tuple(group.uid for group in groups), distribution or Distribution())

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def sequences(self) -> int:
        """S, also of sequences without a trained token."""
        return self.group.numel()

    @property
    def segment_length(self) -> Tensor:
        """[segments]"""
        return torch.diff(self.segment_start, append=self.segment_start.new_tensor([len(self)]))

    @property
    def segment_of_token(self) -> Tensor:
        """[N]"""
        return self.segment_length.new_tensor(range(self.segment_start.numel())).repeat_interleave(self.segment_length)

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sums of a token column over each sequence's trained tokens. [N] -> [S]"""
        picked = self.trained.to(values.device)
        total = values.new_zeros(self.sequences)
        return total.index_add(0, self.sequence.to(values.device)[picked], values[picked])

    def per_token(self, values: Tensor) -> Tensor:
        """Each sequence's value at its trained tokens, 0 elsewhere. [S] -> [N]"""
        if not self.sequences:
            return values.new_zeros(len(self))
        spread = values[self.sequence.clamp(min=0).to(values.device)]
        return torch.where(self.trained.to(values.device), spread, torch.zeros_like(spread))

    @property
    def trained_per_sequence(self) -> Tensor:
        """[S] int64"""
        return self.per_sequence(self.trained.long())

    def weigh(self, weighting: Weighting, divisor: int | None = None) -> "Batch":
        """The batch with ``weight`` filled: each trained token's share of this optimizer step, from counts over the
        whole of this batch. This is the only normaliser there is.

        ``token``: 1 / trained tokens (DAPO, arXiv 2503.14476). ``sequence``: 1 / (sequences x the sequence's trained
        tokens) (GRPO, arXiv 2402.03300). ``group``: 1 / (groups x the group's trained tokens). ``constant``:
        1 / (sequences x ``divisor``) (Dr. GRPO, arXiv 2503.20783). What has no trained token is not counted.
        """
        per_sequence = self.trained_per_sequence.double()
        counted = (per_sequence > 0).sum().clamp(min=1)
        if weighting == "token":
            share = torch.full_like(per_sequence, 1.0) / per_sequence.sum().clamp(min=1)
        elif weighting == "sequence":
            share = 1.0 / (counted * per_sequence.clamp(min=1))
        elif weighting == "group":
            per_group = torch.zeros(len(self.group_uids), dtype=torch.float64).index_add(0, self.group, per_sequence)
            share = 1.0 / ((per_group > 0).sum().clamp(min=1) * per_group.clamp(min=1)[self.group])
        else:
            if not divisor:
                raise ValueError("weighting 'constant' needs a divisor (the longest possible answer, in tokens)")
            share = torch.full_like(per_sequence, 1.0) / (counted * divisor)
        return replace(self, weight=self.per_token(share))

    def select(self, sequences: Tensor) -> tuple["Batch", Tensor]:
        """The batch of the given sequences (ascending indices, [s]) with the shared segments they hang on, and the
        indices of its tokens in this batch, [n]. Weights and all other columns go along unchanged.
        """
        wanted = torch.zeros(self.sequences + 1, dtype=torch.bool)
        wanted[sequences] = True  # the extra last place stands for -1, "shared"
        keep = wanted[self.sequence[self.segment_start]]
        for child in range(keep.numel() - 1, -1, -1):
            if keep[child] and self.segment_parent[child] >= 0:
                keep[self.segment_parent[child]] = True

        tokens = keep[self.segment_of_token].nonzero().squeeze(1)
        new_token = torch.full((len(self) + 1,), -1)
        new_token[tokens] = torch.arange(tokens.numel())
        new_segment = torch.full((keep.numel() + 1,), -1)
        new_segment[:-1][keep] = torch.arange(int(keep.sum()))
        new_sequence = torch.full((self.sequences + 1,), -1)
        new_sequence[:-1][wanted[:-1]] = torch.arange(int(wanted.sum()))
        rows = wanted[:-1].nonzero().squeeze(1)

        columns: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, Tensor) and "axis" in column.metadata:
                columns[column.name] = value[tokens if column.metadata["axis"] == "token" else rows]
        columns["predictor"] = new_token[columns["predictor"]]
        columns["sequence"] = new_sequence[columns["sequence"]]
        columns["segment_start"] = new_token[self.segment_start[keep]]
        columns["segment_parent"] = new_segment[self.segment_parent[keep]]
        columns["scores"] = {name: value[rows] for name, value in self.scores.items()}
        return replace(self, **columns), tokens

    def minibatches(self, count: int, seed: int = 0) -> list[tuple["Batch", Tensor]]:
        """Split by whole groups into at most ``count`` parts of nearly equal numbers of groups, shuffled by ``seed``;
        each with the indices of its tokens in this batch. One part keeps the order.
        """
        groups = torch.unique(self.group)
        count = max(1, min(count, groups.numel()))
        if count == 1:
            return [(self, torch.arange(len(self)))]
        generator = torch.Generator().manual_seed(derive_seed("minibatches", seed))
        shuffled = groups[torch.randperm(groups.numel(), generator=generator)]
        return [self.select(torch.isin(self.group, part).nonzero().squeeze(1)) for part in shuffled.tensor_split(count)]

    def to(self, device: torch.device | str) -> "Batch":
        """The batch with its token and sequence columns on a device."""
        moved: dict[str, Any] = {
            c.name: v.to(device) for c in fields(self) if isinstance(v := getattr(self, c.name), Tensor)
        }
        return replace(self, **moved, scores={name: value.to(device) for name, value in self.scores.items()})


def _leading(trajectory: Trajectory) -> list[int]:
    """The tokens before the first trained one."""
    return [token for span in takewhile(lambda span: not span.trained, trajectory.spans) for token in span.tokens]


def _same_start(lists: Sequence[list[int]]) -> list[int]:
    """The longest common prefix. With one list, the list itself."""
    if not lists:
        return []
    low, high = min(lists), max(lists)  # what the first and last in order share, all share
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


class _Layout:
    """Lists that grow into a batch."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position: list[int] = []
        self.predictor: list[int] = []
        self.sequence: list[int] = []
        self.trained: list[bool] = []
        self.logprobs: list[float] = []
        self.start: list[int] = []
        self.parent: list[int] = []
        self.group: list[int] = []
        self.trajectories: list[Trajectory] = []
        self.sampled = False

    def segment(
        self, tokens: list[int], trained: list[bool], logprobs: list[float] | None, parent: int, sequence: int
    ) -> int:
        before = len(self.tokens)
        if parent < 0:
            previous, offset = -1, 0
        else:
            end = self.start[parent + 1] if parent + 1 < len(self.start) else before
            previous, offset = end - 1, self.position[end - 1] + 1
        self.start.append(before)
        self.parent.append(parent)
        self.tokens += tokens
        self.position += range(offset, offset + len(tokens))
        self.predictor += [previous, *range(before, before + len(tokens) - 1)]
        self.sequence += [sequence] * len(tokens)
        self.trained += [flag and (i > 0 or previous >= 0) for i, flag in enumerate(trained)]
        self.logprobs += logprobs or [0.0] * len(tokens)
        return len(self.start) - 1

    def shared_segment(self, tokens: list[int], parent: int) -> int:
        return self.segment(tokens, [False] * len(tokens), None, parent, sequence=-1)

    def add_sequence(self, uid: str, group: int, trajectory: Trajectory, root: int, shared: int) -> None:
        if trajectory.status is Status.FAILED:
            raise DataError(f"group {uid!r} holds a failed trajectory ({trajectory.error}); drop or retry it first")
        tokens, trained, logprobs = [], [], []
        for span in trajectory.spans:
            tokens += span.tokens
            trained += [span.trained] * len(span.tokens)
            logprobs += span.logprobs or [0.0] * len(span.tokens)
            self.sampled |= span.logprobs is not None
            if span.logprobs is not None and len(span.logprobs) != len(span.tokens):
                raise DataError(f"group {uid!r}: {len(span.tokens)} sampled tokens with {len(span.logprobs)} log-probs")
        if not tokens:
            raise DataError(f"group {uid!r} holds a trajectory without any token")
        if tokens[shared:]:
            self.segment(tokens[shared:], trained[shared:], logprobs[shared:], root, len(self.trajectories))
        self.group.append(group)
        self.trajectories.append(trajectory)

    def batch(self, uids: tuple[str, ...], distribution: Distribution) -> Batch:
        names = dict.fromkeys(name for trajectory in self.trajectories for name in trajectory.scores)
        return Batch(
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            position=torch.tensor(self.position, dtype=torch.long),
            predictor=torch.tensor(self.predictor, dtype=torch.long),
            sequence=torch.tensor(self.sequence, dtype=torch.long),
            trained=torch.tensor(self.trained, dtype=torch.bool),
            segment_start=torch.tensor(self.start, dtype=torch.long),
            segment_parent=torch.tensor(self.parent, dtype=torch.long),
            group=torch.tensor(self.group, dtype=torch.long),
            reward=torch.tensor([t.reward for t in self.trajectories], dtype=torch.float64),
            truncated=torch.tensor([t.status is Status.TRUNCATED for t in self.trajectories], dtype=torch.bool),
            group_uids=uids,
            distribution=distribution,
            scores={
                name: torch.tensor([t.scores.get(name, float("nan")) for t in self.trajectories], dtype=torch.float64)
                for name in names
            },
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32) if self.sampled else None,
        )
