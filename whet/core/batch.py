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
from typing import Any, Literal

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.base.seeds import derive_seed
from whet.core.forest import columns_of, places, predictors
from whet.core.types import Distribution, Group, Weighting

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
    episode: Tensor = field(metadata=_SEQUENCE)  # [S] int64, ascending; its branches share reward, scores and status
    group_uids: tuple[str, ...] = ()
    distribution: Distribution = field(default_factory=Distribution)  # of which log-probs are taken
    scores: dict[str, Tensor] = field(default_factory=dict)  # [S] float64 each; nan where missing, 0 if cut short
    weight: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float64; share of the optimizer step
    turn_rewards: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float64; at the last token of each reply
    replies_before: Tensor | None = field(default=None, metadata=_SEQUENCE)  # [S] int64; those it inherits as context
    experts: Tensor | None = field(default=None, metadata=_TOKEN)  # [N, layers, k] int16, the generator's; -1: unknown
    rollout_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float32, as sampled
    old_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the step's start; nan: not computed
    reference_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    values: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    advantages: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    returns: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    columns: dict[str, Column] = field(default_factory=dict)  # all others, by name

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], *, share_prompts: bool = True, distribution: Distribution | None = None
    ) -> Batch:
        """Lay out the trajectories of the groups, in order. The tokens that trajectories of a group have in common
        before their first trained token become shared segments; so do those that all groups have in common (a system
        prompt, say). Beyond the prompt of a group a common stretch must be long enough to be worth it.
        ``share_prompts=False`` makes every trajectory a root.

        Raises ``DataError`` for a failed episode, or a trajectory whose spans have no tokens.
        """
        return cls(
            **columns_of(groups, share_prompts),
            group_uids=tuple(group.uid for group in groups),
            distribution=distribution or Distribution(),
        )

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def sequences(self) -> int:
        """S, counting sequences without a trained token too, and those without any: each stands for an episode that
        was cut before its first reply."""
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
        """Return a score of the sequences, [S]. Raises ``DataError`` where none has it, unless all were cut short."""
        if bool(self.truncated.all()) and name not in self.scores:
            return torch.zeros_like(self.reward)
        if name not in self.scores:
            known = ", ".join(self.scores) or "none"
            raise DataError(f"no answer has the score {name!r}; the scores are: {known}")
        return self.scores[name]

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sum a token column over each sequence's trained tokens. [N] -> [S]"""
        picked = torch.where(self.trained.to(values.device), values, torch.zeros_like(values))
        return values.new_zeros(self.sequences).index_add(0, self.sequence.clamp(min=0).to(values.device), picked)

    def per_token(self, values: Tensor) -> Tensor:
        """Put each sequence's value at its trained tokens, 0 elsewhere. [S] -> [N]"""
        if not self.sequences:
            return values.new_zeros(len(self))
        spread = values[self.sequence.clamp(min=0).to(values.device)]
        return torch.where(self.trained.to(values.device), spread, torch.zeros_like(spread))

    @property
    def trained_tokens(self) -> Tensor:
        """The indices of the trained tokens, sequence by sequence. In the layout a sequence may stand before one of a
        lower number, where it shares a beginning with an earlier one."""
        token = self.trained.nonzero().squeeze(1)
        return token[torch.argsort(self.sequence[token], stable=True)]

    @property
    def trained_per_sequence(self) -> Tensor:
        """The number of trained tokens of each sequence, [S] int64."""
        return self.per_sequence(self.trained.long())

    @property
    def first_branch(self) -> Tensor:
        """Return which sequences are the first of their episode, [S] bool: one for each episode."""
        return torch.diff(self.episode, prepend=self.episode.new_tensor([-1])) != 0

    def per_episode(self, values: Tensor) -> Tensor:
        """Sum over the branches of each sequence's episode. [S] -> [S]"""
        if not self.sequences:
            return values
        return values.new_zeros(int(self.episode[-1]) + 1).index_add(0, self.episode, values)[self.episode]

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

        ``token``: 1 / trained tokens (DAPO, arXiv 2503.14476). ``sequence``: 1 / (episodes x the episode's trained
        tokens) (GRPO, arXiv 2402.03300). ``group``: 1 / (groups x the group's trained tokens). ``constant``:
        1 / (episodes x ``divisor``) (Dr. GRPO, arXiv 2503.20783). An episode or group without a
        trained token is not counted.
        """
        per_sequence = self.trained_per_sequence.double()
        per_episode = self.per_episode(per_sequence)
        counted = ((per_episode > 0) & self.first_branch).sum().clamp(min=1)
        if weighting == "token":
            share = torch.full_like(per_sequence, 1.0) / per_sequence.sum().clamp(min=1)
        elif weighting == "sequence":
            share = 1.0 / (counted * per_episode.clamp(min=1))
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
        tokens = places(self.segment_start[segments], length)
        new_segment, new_sequence = torch.full((len(keep) + 1,), -1), torch.full((self.sequences + 1,), -1)
        new_segment[segments] = torch.arange(len(segments))
        new_sequence[sequences] = torch.arange(len(sequences))
        kept = {"token": tokens, "sequence": sequences, "segment": segments}
        part = self._each(lambda column, axis: column[kept[axis]])
        part.segment_start, part.segment_parent = start, new_segment[part.segment_parent]
        part.sequence = new_sequence[part.sequence]
        part.predictor = predictors(start, length, part.segment_parent)
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
