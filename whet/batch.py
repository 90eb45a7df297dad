"""The two narrow waists: ``Batch``, the tokens that a model learns from, and ``ModelOutput``, its log-probs of them.

A batch is a forest of segments. A segment is a run of tokens with a parent segment or none. A token attends to all
tokens of its ancestors and causally within its own segment; its position continues its parent's. Sixteen answers to
one prompt are one prompt segment with sixteen children, computed once. Trained tokens belong to exactly one sequence;
only untrained tokens are shared.

Nothing here knows a model, a device mesh or an algorithm. Shapes: N tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Any, Literal

from whet.errors import DataError
from whet.lazy import Tensor, torch
from whet.seeds import derive_seed
from whet.types import Distribution, Group, Status, Trajectory, Weighting

MIN_COMMON_PREFIX = 16  # tokens; below this, one more level of attention costs more than it saves

Axis = Literal["token", "sequence"]
Output = Literal["logprobs", "entropy", "values", "topk", "topk_ids"]

_TOKEN, _SEQUENCE, _SEGMENT = {"axis": "token"}, {"axis": "sequence"}, {"axis": "segment"}


@dataclass(slots=True)
class ModelOutput:
    """A model's output for a batch: float32 (float64 models: float64), the same on every rank that has the tokens."""

    logprobs: Tensor  # [N]; of each trained token under the batch's distribution, 0 elsewhere
    entropy: Tensor | None = None  # [N]; of the distribution that predicts each trained token, 0 elsewhere
    values: Tensor | None = None  # [N]; of a scalar head, at each trained token's predictor
    topk: Tensor | None = None  # [N, K]; log-probs of the ids in the batch's column ``topk_ids``, or of those below
    topk_ids: Tensor | None = None  # [N, K] int64; the likeliest tokens, where the model was asked to name them

    def column(self, name: Output) -> Tensor:
        """Return one of the tensors above. Raises ``DataError`` where the model was not asked for it."""
        found: Tensor | None = getattr(self, name)
        if found is None:
            raise DataError(f"the model was not asked for {name!r}; a loss must name it in `outputs`")
        return found


@dataclass(slots=True, frozen=True)
class Column:
    """One value, or row of values, for each token or for each sequence of a batch."""

    values: Tensor  # [N, ...] or [S, ...]
    axis: Axis = "token"


@dataclass(slots=True)
class Batch:
    """Packed tokens with everything a loss may read.

    Columns are filled as the algorithm needs them. The common ones are attributes; all others, also a user's own, are
    in ``columns``. ``fill`` and ``column`` write and read both.

        batch.fill("difficulty", torch.tensor([0.2, 0.9]), axis="sequence")
        batch.column("difficulty")
    """

    tokens: Tensor = field(metadata=_TOKEN)  # [N] int64
    position: Tensor = field(metadata=_TOKEN)  # [N] int64
    predictor: Tensor = field(metadata=_TOKEN)  # [N] int64; the token that predicts it, -1: none
    sequence: Tensor = field(metadata=_TOKEN)  # [N] int64; -1 where shared
    trained: Tensor = field(metadata=_TOKEN)  # [N] bool
    segment_start: Tensor = field(metadata=_SEGMENT)  # [segments] int64, ascending; it ends where the next one starts
    segment_parent: Tensor = field(metadata=_SEGMENT)  # [segments] int64; -1: a root; parents stand before children
    group: Tensor = field(metadata=_SEQUENCE)  # [S] int64, index into group_uids
    reward: Tensor = field(metadata=_SEQUENCE)  # [S] float64
    truncated: Tensor = field(metadata=_SEQUENCE)  # [S] bool
    group_uids: tuple[str, ...] = ()
    distribution: Distribution = field(default_factory=Distribution)  # of which log-probs are taken
    scores: dict[str, Tensor] = field(default_factory=dict)  # [S] float64 each; nan where a sequence lacks the score
    weight: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float64; share of the optimizer step
    rollout_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float32, as sampled
    old_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    reference_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    values: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    advantages: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    returns: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    columns: dict[str, Column] = field(default_factory=dict)  # all others, by name

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], *, share_prompts: bool = True, distribution: Distribution | None = None
    ) -> Batch:
        """Lay out the trajectories of the groups, in order. The tokens that all trajectories of a group have in common
        before the first trained token become one shared segment; so do those that all groups have in common (a system
        prompt, say), if they are enough to be worth it. ``share_prompts=False`` makes every trajectory a root.

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
        """S, counting sequences without a trained token too."""
        return self.group.numel()

    @property
    def segment_length(self) -> Tensor:
        """The number of tokens of each segment, [segments]."""
        return torch.diff(self.segment_start, append=self.segment_start.new_tensor([len(self)]))

    @property
    def filled(self) -> frozenset[str]:
        """Return the names of the columns that ``column`` would find."""
        return frozenset(name for name in _COMMON if getattr(self, name) is not None) | self.columns.keys()

    def fill(self, name: str, values: Tensor, axis: Axis = "token") -> None:
        """Put ``values``, [N, ...] or [S, ...], into the column ``name``. Raises ``DataError`` for another size."""
        size = len(self) if axis == "token" else self.sequences
        if values.ndim == 0 or len(values) != size:
            raise DataError(f"column {name!r} has the shape {list(values.shape)}, but there are {size} {axis}s")
        if name in _COMMON:
            setattr(self, name, values)
        else:
            self.columns = self.columns | {name: Column(values, axis)}

    def column(self, name: str) -> Tensor:
        """Return the values of a column. Raises ``DataError`` where it is not filled."""
        if name not in self.filled:
            there = ", ".join(sorted(self.filled)) or "none"
            raise DataError(
                f"the column {name!r} is not filled; there are: {there}. A loss names what it reads in `reads`, and an "
                "algorithm what its `prepare` fills in `fills`"
            )
        found: Tensor = getattr(self, name) if name in _COMMON else self.columns[name].values
        return found

    def score(self, name: str) -> Tensor:
        """Return a score of the sequences, [S]. Raises ``DataError`` where none has it."""
        if name not in self.scores:
            known = ", ".join(self.scores) or "none"
            raise DataError(f"no answer has the score {name!r}; the scores are: {known}")
        return self.scores[name]

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sum a token column over each sequence's trained tokens. [N] -> [S]"""
        picked = self.trained.to(values.device)
        total = values.new_zeros(self.sequences)
        return total.index_add(0, self.sequence.to(values.device)[picked], values[picked])

    def per_token(self, values: Tensor) -> Tensor:
        """Put each sequence's value at its trained tokens, 0 elsewhere. [S] -> [N]"""
        if not self.sequences:
            return values.new_zeros(len(self))
        spread = values[self.sequence.clamp(min=0).to(values.device)]
        return torch.where(self.trained.to(values.device), spread, torch.zeros_like(spread))

    @property
    def trained_per_sequence(self) -> Tensor:
        """The number of trained tokens of each sequence, [S] int64."""
        return self.per_sequence(self.trained.long())

    def paths(self) -> list[Tensor]:
        """Return the tokens of each sequence in order, shared ones first, as indices into this batch: S tensors, [n]
        each, empty for a sequence without a token of its own."""
        start, length = self.segment_start.tolist(), self.segment_length.tolist()
        runs: list[Tensor] = []  # of each segment, with its ancestors
        found = [torch.zeros(0, dtype=torch.long)] * self.sequences
        for segment, (parent, sequence) in enumerate(
            zip(self.segment_parent.tolist(), self.sequence[self.segment_start].tolist(), strict=True)
        ):
            own = torch.arange(start[segment], start[segment] + length[segment])
            runs.append(own if parent < 0 else torch.cat([runs[parent], own]))
            if sequence >= 0:
                found[sequence] = runs[segment]
        return found

    def weigh(self, weighting: Weighting, divisor: int | None = None) -> Batch:
        """Return the batch with ``weight`` filled: each trained token's share of this optimizer step, from counts over
        the whole batch. This is the only normaliser there is.

        ``token``: 1 / trained tokens (DAPO, arXiv 2503.14476). ``sequence``: 1 / (sequences x the sequence's trained
        tokens) (GRPO, arXiv 2402.03300). ``group``: 1 / (groups x the group's trained tokens). ``constant``:
        1 / (sequences x ``divisor``) (Dr. GRPO, arXiv 2503.20783). A sequence or group without a
        trained token is not counted.
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

    def select(self, sequences: Tensor) -> tuple[Batch, Tensor]:
        """Return the batch of the given sequences (ascending indices, [s]) with the shared segments above them,
        and the indices of its tokens in this batch, [n]. Weights and all other columns are kept unchanged.
        """
        wanted = torch.zeros(self.sequences + 1, dtype=torch.bool)
        wanted[sequences] = True  # the extra last place stands for -1, "shared"
        keep = wanted[self.sequence[self.segment_start]]
        while True:  # until the parents of all that is kept are kept
            parents = self.segment_parent[keep]
            parents = parents[parents >= 0]
            if bool(keep[parents].all()):
                break
            keep[parents] = True

        segments = keep.nonzero().squeeze(1)
        length = self.segment_length[segments]
        start = length.cumsum(0) - length
        tokens = torch.arange(int(length.sum())) + (self.segment_start[segments] - start).repeat_interleave(length)
        new_segment, new_sequence = torch.full((len(keep) + 1,), -1), torch.full((self.sequences + 1,), -1)
        new_segment[segments] = torch.arange(len(segments))
        new_sequence[sequences] = torch.arange(len(sequences))
        kept = {"token": tokens, "sequence": sequences, "segment": segments}
        part = self._each(lambda column, axis: column[kept[axis]])
        part.segment_start, part.segment_parent = start, new_segment[part.segment_parent]
        part.sequence = new_sequence[part.sequence]
        part.predictor = _predictors(start, length, part.segment_parent)
        return part, tokens

    def minibatches(self, count: int, seed: int = 0) -> list[tuple[Batch, Tensor]]:
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

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with all its columns on a device."""
        return self._each(lambda column, _: column.to(device))

    def _each(self, change: Callable[[Tensor, str], Tensor]) -> Batch:
        """Return the batch with every tensor replaced by ``change`` of it and its axis."""
        own: dict[str, Any] = {
            f.name: change(v, f.metadata["axis"])
            for f in fields(self)
            if "axis" in f.metadata and (v := getattr(self, f.name)) is not None
        }
        scores = {name: change(values, "sequence") for name, values in self.scores.items()}
        columns = {name: Column(change(c.values, c.axis), c.axis) for name, c in self.columns.items()}
        return replace(self, **own, scores=scores, columns=columns)


_COMMON = tuple(column.name for column in fields(Batch) if "axis" in column.metadata and column.default is None)


def _predictors(start: Tensor, length: Tensor, parent: Tensor) -> Tensor:
    """Return the token before each token; of a segment's first token its parent's last one, -1 in a root. [N]"""
    last = start + length - 1
    predictor = torch.arange(int(length.sum())) - 1
    predictor[start] = torch.where(parent < 0, -1, last[parent])
    return predictor


def _leading(trajectory: Trajectory) -> list[int]:
    """Return the tokens before the first trained one."""
    return [token for span in takewhile(lambda span: not span.trained, trajectory.spans) for token in span.tokens]


def _same_start(lists: Sequence[list[int]]) -> list[int]:
    """Return the longest common prefix; of one list the list itself."""
    if not lists:
        return []
    low, high = min(lists), max(lists)  # a prefix of the first and the last in order is a prefix of all
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


class _Layout:
    """A batch under construction, from lists of segments and sequences."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of all segments
        self.trained: list[bool] = []
        self.logprobs: list[float] = []
        self.length: list[int] = []  # of each segment
        self.parent: list[int] = []
        self.sequence: list[int] = []
        self.position: list[int] = []  # of its first token
        self.group: list[int] = []  # of each sequence
        self.trajectories: list[Trajectory] = []
        self.sampled = False

    def segment(self, tokens: list[int], trained: list[bool], logprobs: list[float], parent: int, sequence: int) -> int:
        self.tokens += tokens
        self.trained += trained
        self.logprobs += logprobs
        self.position.append(0 if parent < 0 else self.position[parent] + self.length[parent])
        self.length.append(len(tokens))
        self.parent.append(parent)
        self.sequence.append(sequence)
        return len(self.parent) - 1

    def shared_segment(self, tokens: list[int], parent: int) -> int:
        return self.segment(tokens, [False] * len(tokens), [0.0] * len(tokens), parent, sequence=-1)

    def add_sequence(self, uid: str, group: int, trajectory: Trajectory, root: int, shared: int) -> None:
        if trajectory.status is Status.FAILED:
            raise DataError(f"group {uid!r} holds a failed trajectory ({trajectory.error}); drop or retry it first")
        tokens, trained, logprobs = list[int](), list[bool](), list[float]()
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
        length, parent = torch.tensor(self.length, dtype=torch.long), torch.tensor(self.parent, dtype=torch.long)
        start = length.cumsum(0) - length
        offset = torch.tensor(self.position, dtype=torch.long) - start
        trained = torch.tensor(self.trained, dtype=torch.bool)
        trained[start[parent < 0]] = False  # nothing predicts the first token of a root
        rows = self.trajectories
        names = dict.fromkeys(name for row in rows for name in row.scores)
        return Batch(
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            position=torch.arange(len(self.tokens)) + offset.repeat_interleave(length),
            predictor=_predictors(start, length, parent),
            sequence=torch.tensor(self.sequence, dtype=torch.long).repeat_interleave(length),
            trained=trained,
            segment_start=start,
            segment_parent=parent,
            group=torch.tensor(self.group, dtype=torch.long),
            reward=_numbers([row.reward for row in rows]),
            truncated=torch.tensor([row.status is Status.TRUNCATED for row in rows], dtype=torch.bool),
            group_uids=uids,
            distribution=distribution,
            scores={name: _numbers([row.scores.get(name, float("nan")) for row in rows]) for name in names},
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32) if self.sampled else None,
        )


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
