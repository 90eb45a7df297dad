"""The two central interfaces: ``Batch``, the packed tokens of a training step, and ``ModelOutput``, their log-probs.

A batch is a forest of segments. A segment is a run of tokens that may have a parent segment. A token attends to all
tokens of its segment's ancestors and causally within its segment; its position continues the parent's. Sixteen answers
to one prompt are one prompt segment, computed once, with sixteen children. A trained token belongs to exactly one
sequence; only untrained tokens are shared.

Independent of models, device meshes and algorithms. Shapes: N tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.base.seeds import derive_seed
from whet.core.forest import columns_of, concat_aranges, counted, paths, predictors, repeated, with_ancestors
from whet.core.types import Distribution, Group, Weighting
from whet.core.weighting import shares

Axis = Literal["token", "sequence"]
Output = Literal["logprobs", "entropy", "values", "topk", "topk_ids"]

_TOKEN, _SEQUENCE, _SEGMENT = {"axis": "token"}, {"axis": "sequence"}, {"axis": "segment"}


@dataclass(slots=True)
class ModelOutput:
    """A model's output for a batch: float32 (float64 models: float64), identical on every rank that has the tokens."""

    logprobs: Tensor  # [N]; of each trained token under the batch's distribution, 0 elsewhere
    entropy: Tensor | None = None  # [N]; of the distribution that predicts each trained token, 0 elsewhere
    values: Tensor | None = None  # [N]; of a scalar head, at each trained token's predictor
    topk: Tensor | None = None  # [N, K]; log-probs of the batch's column ``topk_ids``, else of ``topk_ids`` below
    topk_ids: Tensor | None = None  # [N, K] int64; the most likely tokens, if the model was asked for them

    def columns(self) -> dict[str, Tensor]:
        """Return the tensors above that the model was asked for, by name."""
        return {each.name: tensor for each in fields(self) if (tensor := getattr(self, each.name)) is not None}

    def column(self, name: Output) -> Tensor:
        """Return one of the tensors above. Raises ``DataError`` if the model was not asked for it."""
        if (tensor := self.columns().get(name)) is None:
            raise DataError(f"the model was not asked for {name!r}; a loss must name it in `outputs`")
        return tensor


@dataclass(slots=True, frozen=True)
class Column:
    """One value, or one row of values, for each token or each sequence of a batch."""

    values: Tensor  # [N, ...] or [S, ...]
    axis: Axis


@dataclass(slots=True)
class Batch:
    """Packed tokens with all columns that a loss may read.

    Columns are filled as the algorithm needs them. Common columns are attributes; all others, including user-defined
    ones, are in ``columns``. ``fill`` and ``column`` write and read both kinds.

        batch.fill("difficulty", torch.tensor([0.2, 0.9]), axis="sequence")
        batch.column("difficulty")
    """

    tokens: Tensor = field(metadata=_TOKEN)  # [N] int32; below 0: a placeholder of an image, see whet.core.images
    trained: Tensor = field(metadata=_TOKEN)  # [N] bool, the loss mask
    segment_start: Tensor = field(metadata=_SEGMENT)  # [segments] int64, ascending; the end is the next start
    segment_parent: Tensor = field(metadata=_SEGMENT)  # [segments] int64; -1: a root; parents come before children
    segment_position: Tensor = field(metadata=_SEGMENT)  # [segments] int64, of the first token
    segment_sequence: Tensor = field(metadata=_SEGMENT)  # [segments] int64; -1: shared
    group: Tensor = field(metadata=_SEQUENCE)  # [S] int64, index into group_uids
    reward: Tensor = field(metadata=_SEQUENCE)  # [S] float64
    truncated: Tensor = field(metadata=_SEQUENCE)  # [S] bool
    episode: Tensor = field(metadata=_SEQUENCE)  # [S] int64, ascending; its branches share reward, scores and status
    group_uids: tuple[str, ...] = ()
    distribution: Distribution = field(default_factory=Distribution)  # under which log-probs are computed
    scores: dict[str, Tensor] = field(default_factory=dict)  # [S] float64 each; nan where missing, 0 if truncated
    images: tuple[str, ...] = ()  # data URLs
    image: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] int64; index into images, -1: not an image
    share: Tensor | None = field(default=None, metadata=_SEQUENCE)  # [S] float64; of the step, for each trained token
    turn_rewards: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float64; at the last token of each reply
    replies_before: Tensor | None = field(default=None, metadata=_SEQUENCE)  # [S] int64; replies inherited as context
    experts: Tensor | None = field(default=None, metadata=_TOKEN)  # [N, layers, k] int16, the generator's; -1: unknown
    rollout_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N] float32, from the generator
    old_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step; nan: unset
    reference_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    values: Tensor | None = field(default=None, metadata=_TOKEN)  # [N], at the start of the step
    token_advantages: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    answer_advantages: Tensor | None = field(default=None, metadata=_SEQUENCE)  # [S]; of each trained token, instead
    returns: Tensor | None = field(default=None, metadata=_TOKEN)  # [N]
    columns: dict[str, Column] = field(default_factory=dict)  # all other columns, by name

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], *, share_prompts: bool = True, distribution: Distribution | None = None
    ) -> Batch:
        """Lay out the trajectories of the groups, in order. A prefix that the trajectories of a group have in common
        before their first trained token becomes a shared segment, and so does a prefix common to all groups, such as a
        system prompt. Further common prefixes are shared if they have at least ``MIN_COMMON_PREFIX`` tokens.
        ``share_prompts=False`` makes every trajectory a root. Each role of a group is a group of the batch, and each
        role of an episode an episode, so that roles have separate rewards and baselines.

        Raises ``DataError`` for a failed episode, or for a trajectory whose spans have no tokens.
        """
        return cls(**columns_of(groups, share_prompts), distribution=distribution or Distribution())

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def sequences(self) -> int:
        """S, including sequences without a trained token, and sequences without any token, which stand for episodes
        that were truncated before their first reply."""
        return self.group.numel()

    @property
    def segment_length(self) -> Tensor:
        """Tokens per segment, [segments]."""
        return torch.diff(self.segment_start, append=self.segment_start.new_tensor([len(self)]))

    @property
    def position(self) -> Tensor:
        """Each token's position after the start of its root, [N] int64."""
        return concat_aranges(self.segment_position, self.segment_length)

    @property
    def predictor(self) -> Tensor:
        """The index of the token that predicts each token, -1 for the first token of a root. [N] int64"""
        return predictors(self.segment_start, self.segment_length, self.segment_parent)

    @property
    def weight(self) -> Tensor | None:
        """Each token's share of the optimizer step, 0 where it is not trained; None before ``weigh``. [N] float64"""
        return None if self.share is None else self.per_token(self.share)

    @property
    def advantages(self) -> Tensor | None:
        """The advantages of all tokens, [N], also where ``fill`` was given one number for each sequence."""
        if self.token_advantages is not None or self.answer_advantages is None:
            return self.token_advantages
        return self.per_token(self.answer_advantages)

    @advantages.setter
    def advantages(self, values: Tensor) -> None:
        self.fill("advantages", values)

    @property
    def sequence(self) -> Tensor:
        """Each token's sequence, -1 where it is shared. [N] int64"""
        return repeated(self.segment_sequence, self.segment_length, len(self))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all attributes that are set, by name."""
        return {name: tensor for name in _AXES if (tensor := getattr(self, name)) is not None}

    @property
    def filled(self) -> frozenset[str]:
        """The names of the filled columns."""
        names = _COMMON & self.tensors().keys()
        weight = {"weight"} if "share" in names else set[str]()
        advantages = {"advantages"} if names & _ADVANTAGES else set[str]()
        return frozenset(names - _ADVANTAGES | weight | advantages | self.columns.keys())

    def fill(self, name: str, values: Tensor, axis: Axis = "token") -> None:
        """Write ``values``, [N, ...] or [S, ...], to the column ``name``. Advantages that are one number for each
        sequence count for its trained tokens. Raises ``DataError`` for a wrong shape."""
        if not isinstance(values, torch.Tensor):
            raise DataError(
                f"column {name!r} must be a tensor, not a {type(values).__name__}: torch.as_tensor makes one"
            )
        if axis not in ("token", "sequence"):
            raise DataError(f"the axis of column {name!r} is 'token' or 'sequence', not {axis!r}")
        size = len(self) if axis == "token" else self.sequences
        if values.ndim > 1 and (name in _COMMON or name == "advantages") and name != "experts":
            raise DataError(f"column {name!r} has the shape {list(values.shape)}: it has one number for each {axis}")
        if values.ndim == 0 or len(values) != size:
            raise DataError(f"column {name!r} has the shape {list(values.shape)}, but there are {size} {axis}s")
        if name in _LAYOUT:
            raise DataError(
                f"{name!r} is a part of the batch's layout, which no column replaces"
                + (": set batch.reward = values" if name == "reward" else "; choose another name")
            )
        if name == "weight":
            raise DataError('the weights of tokens are computed from the column "share", one number for each sequence')
        if name == "advantages":
            by_token = axis == "token"
            self.token_advantages, self.answer_advantages = (values, None) if by_token else (None, values)
        elif name in _COMMON:
            setattr(self, name, values)
        else:
            self.columns = self.columns | {name: Column(values, axis)}

    def column(self, name: str) -> Tensor:
        """Return the values of a column. Raises ``DataError`` if it is not filled."""
        if name not in self.filled:
            filled = ", ".join(sorted(self.filled)) or "none"
            raise DataError(
                f"the column {name!r} is not filled. Filled columns: {filled}. A loss lists the columns it reads in "
                "`reads`, and an algorithm the columns that its `prepare` fills in `fills`"
            )
        return self.columns[name].values if name in self.columns else getattr(self, name)

    def score(self, name: str) -> Tensor:
        """Return a score per sequence, [S]. Raises ``DataError`` if no sequence has it, unless all are truncated."""
        if bool(self.truncated.all()) and name not in self.scores:
            return torch.zeros_like(self.reward)
        if name not in self.scores:
            names = ", ".join(self.scores) or "none"
            raise DataError(f"no answer has the score {name!r}; the scores are: {names}")
        return self.scores[name]

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sum a token column over each sequence's trained tokens. [N] -> [S]"""
        picked = values.masked_fill(~self.trained.to(values.device), 0)
        return values.new_zeros(self.sequences).index_add(0, self.sequence.clamp_(min=0).to(values.device), picked)

    def per_token(self, values: Tensor) -> Tensor:
        """Broadcast each sequence's value to its trained tokens, 0 elsewhere. [S] -> [N]"""
        if not self.sequences:
            return values.new_zeros(len(self))
        each = values[self.segment_sequence.clamp(min=0).to(values.device)]
        return repeated(each, self.segment_length, len(self)).masked_fill_(~self.trained.to(values.device), 0)

    @property
    def trained_tokens(self) -> Tensor:
        """The indices of the trained tokens, sequence by sequence. The tokens themselves may be in another order,
        because sequences with a common prefix are laid out next to each other."""
        token = self.trained.nonzero().squeeze(1)
        return token[torch.argsort(self.sequence[token], stable=True)]

    @property
    def trained_per_sequence(self) -> Tensor:
        """Trained tokens per sequence, [S] int64."""
        per_segment = counted(self.trained, self.segment_start, self.segment_length)
        per_sequence = self.group.new_zeros(self.sequences + 1)  # the last element is for -1, "shared"
        return per_sequence.index_add(0, self.segment_sequence % len(per_sequence), per_segment)[:-1]

    @property
    def first_branch(self) -> Tensor:
        """Mask of the first sequence of each episode, [S] bool."""
        return torch.diff(self.episode, prepend=self.episode.new_tensor([-1])) != 0

    def per_episode(self, values: Tensor) -> Tensor:
        """Sum over the branches of each sequence's episode. [S] -> [S]"""
        if not self.sequences:
            return values
        return values.new_zeros(int(self.episode[-1]) + 1).index_add(0, self.episode, values)[self.episode]

    def paths(self) -> list[Tensor]:
        """Return the token indices of each sequence in order, shared tokens first: S tensors, [n] each, empty for a
        sequence without unshared tokens."""
        return paths(
            self.segment_start, self.segment_length, self.segment_parent, self.segment_sequence, self.sequences
        )

    def weigh(self, weighting: Weighting, divisor: int | None = None) -> Batch:
        """Return the batch with ``share`` filled: the weight of each trained token in the optimizer step, from counts
        over the whole batch (see ``whet.core.weighting``). Losses are normalised nowhere else."""
        return replace(self, share=shares(self, weighting, divisor))

    def select(self, sequences: Tensor) -> tuple[Batch, Tensor]:
        """Return the batch of the given sequences (ascending indices, [s]) with their shared ancestor segments, and the
        indices of its tokens in this batch, [n]. Weights and all other columns are unchanged.
        """
        selected = torch.zeros(self.sequences + 1, dtype=torch.bool)
        selected[sequences] = True  # the extra last element is for -1, "shared"
        keep = selected[self.segment_sequence]
        segments = with_ancestors(keep, self.segment_parent).nonzero().squeeze(1)
        length = self.segment_length[segments]
        start = length.cumsum(0) - length
        tokens = concat_aranges(self.segment_start[segments], length)
        new_segment, new_sequence = torch.full((len(keep) + 1,), -1), torch.full((self.sequences + 1,), -1)
        new_segment[segments] = torch.arange(len(segments))
        new_sequence[sequences] = torch.arange(len(sequences))
        kept = {"token": tokens, "sequence": sequences, "segment": segments}
        part = self._each(lambda column, axis: column[kept[axis]])
        part.segment_start, part.segment_parent = start, new_segment[part.segment_parent]
        part.segment_sequence = new_sequence[part.segment_sequence]
        if part.image is not None:
            used, part.image = torch.unique(part.image, return_inverse=True)  # -1, if present, comes first
            part.image -= int((used < 0).sum())
            part.images = tuple(self.images[index] for index in used[used >= 0].tolist())
        return part, tokens

    def parts(self, tokens: int = 2**20) -> Iterator[Batch]:
        """Yield the batch in parts of consecutive sequences with about ``tokens`` tokens each, which together have each
        sequence once: what is computed for each token of a part takes less memory than for a whole step."""
        if len(self) <= tokens:
            yield self
            return
        size = self.group.new_zeros(self.sequences + 1)  # the last element is for -1, "shared"
        size.index_add_(0, self.segment_sequence % len(size), self.segment_length)
        counts = torch.unique_consecutive(size[:-1].cumsum(0) // tokens, return_counts=True)[1]
        for sequences in torch.arange(self.sequences).split(counts.tolist()):
            yield self.select(sequences)[0]

    def minibatches(self, count: int, seed: int = 0) -> list[Tensor]:
        """Split whole groups, shuffled by ``seed``, into at most ``count`` minibatches with nearly equal numbers of
        groups. Return the sequences of each, [s] int64, for ``select``.
        """
        groups = torch.unique(self.group)
        count = max(1, min(count, groups.numel()))
        generator = torch.Generator().manual_seed(derive_seed("minibatches", seed))
        shuffled = groups[torch.randperm(groups.numel(), generator=generator)]
        return [torch.isin(self.group, part).nonzero().squeeze(1) for part in shuffled.tensor_split(count)]

    def bare(self) -> Batch:
        """Return the batch without the columns that ``fill`` writes."""
        nothing: dict[str, Any] = dict.fromkeys(_COMMON)
        return replace(self, **nothing, columns={})

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with all columns on a device."""
        return self._each(lambda column, _: column.to(device))

    def _each(self, change: Callable[[Tensor, str], Tensor]) -> Batch:
        """Return the batch with ``change(tensor, axis)`` applied to every tensor."""
        common: dict[str, Any] = {name: change(tensor, _AXES[name]) for name, tensor in self.tensors().items()}
        scores = {name: change(values, "sequence") for name, values in self.scores.items()}
        columns = {name: Column(change(c.values, c.axis), c.axis) for name, c in self.columns.items()}
        return replace(self, **common, scores=scores, columns=columns)


_AXES: dict[str, str] = {each.name: each.metadata["axis"] for each in fields(Batch) if "axis" in each.metadata}
_ADVANTAGES = {"token_advantages", "answer_advantages"}
_LAYOUT = {each.name for each in fields(Batch) if each.default is not None}
_COMMON = {each.name for each in fields(Batch) if each.name in _AXES and each.default is None}
