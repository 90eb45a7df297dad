"""Lays out groups as a forest of segments, in which common prefixes are shared, and builds a ``Batch``'s columns."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.core.content import image_urls
from whet.core.expert_ids import decode, encode, experts_per_token
from whet.core.images import images_of
from whet.core.types import Episode, Group, Span, Status, Trajectory

MIN_COMMON_PREFIX = 16  # tokens; below this, one more level of attention costs more than it saves


@dataclass(slots=True, frozen=True)
class _Sequence:
    """A sequence of the batch under construction."""

    number: int
    group: int
    reward: float
    uid: str
    episode: int
    trajectory: Trajectory
    leading: "array[int]"  # the tokens before the first trained one, which may be shared


def columns_of(groups: Sequence[Group], share_prompts: bool) -> dict[str, Any]:
    """Return the columns of the groups' batch. Raises ``DataError`` for a failed episode, or for a trajectory whose
    spans have no tokens."""
    forest = _Forest()
    members = [sequences for group in groups if (sequences := forest.number(group))]
    if not share_prompts:
        for sequence in [sequence for sequences in members for sequence in sequences]:
            forest.add_unshared(sequence, parent=-1, shared=0)
        return forest.columns()
    prompts = [common_prefix([sequence.leading for sequence in sequences]) for sequences in members]
    common = common_prefix(prompts) if len(members) > 1 else []
    long = len(common) >= MIN_COMMON_PREFIX
    root = forest.add_shared(common, -1, members[0][0], 0) if long else -1
    for sequences in members:
        forest.add(sequences, root, len(common) if root >= 0 else 0, least=1)
    return forest.columns()


def concat_aranges(start: Tensor, length: Tensor) -> Tensor:
    """Concatenate ``arange(start[i], start[i] + length[i])`` over all i. [runs], [runs] -> [sum of lengths]"""
    offset, count = start - (length.cumsum(0) - length), int(length.sum())
    return torch.arange(count, device=start.device).add_(offset.repeat_interleave(length, output_size=count))


def repeated(values: Tensor, length: Tensor, count: int) -> Tensor:
    """Return ``values[i]`` ``length[i]`` times, for all i in order. [runs], [runs] -> [count], the sum of lengths"""
    if values.requires_grad or values.device.type != "cpu" or values.dtype == torch.bfloat16:
        return values.repeat_interleave(length.to(values.device), output_size=count)
    return torch.from_numpy(np.repeat(values.numpy(), length.numpy()))  # torch's also makes an index of 8 bytes a token


def counted(mask: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Return how many tokens of each run the mask has. [N] bool, [runs], [runs] -> [runs] int64"""
    if mask.device.type != "cpu":
        ends = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.cumsum(0)])
        return ends[start + length] - ends[start]
    runs, of_tokens = zip(start.tolist(), (start + length).tolist(), strict=True), mask.numpy()
    # without ``cumsum``, which makes a number for each token
    return _whole([int(np.count_nonzero(of_tokens[begin:end])) for begin, end in runs])


def predictors(start: Tensor, length: Tensor, parent: Tensor) -> Tensor:
    """Return the index of the token that predicts each token: the previous one, for the first token of a segment the
    last of its parent, and -1 for the first token of a root. [N]"""
    last = start + length - 1
    predictor = torch.arange(-1, int(length.sum()) - 1, device=start.device)
    predictor[start] = torch.where(parent < 0, -1, last[parent])
    return predictor


def common_prefix(arrays: "Sequence[array[int]]") -> "array[int]":
    """Return the longest common prefix of the arrays."""
    if not arrays:
        return array("i")
    low, high = min(arrays), max(arrays)  # a common prefix of the smallest and largest array is a prefix of all
    length = min(len(low), len(high))
    differ = np.asarray(low)[:length] != np.asarray(high)[:length]
    return low[: int(differ.argmax()) if differ.any() else length]


class _Forest:
    """A forest under construction, as lists of segments and sequences."""

    def __init__(self) -> None:
        self.pieces: list[Span] = []  # the part of each span that is in a segment, in order
        self.branches: list[Trajectory] = []  # the trajectory of each piece
        self.length: list[int] = []  # per segment
        self.parent: list[int] = []
        self.sequence: list[int] = []
        self.position: list[int] = []  # of the segment's first token
        self.sequences: list[_Sequence] = []
        self.episodes: list[Episode] = []  # one entry for each role of an episode
        self.uids: list[str] = []  # one entry for each role of a group
        self.sampled = self.turns = False

    def number(self, group: Group) -> list[_Sequence]:
        """Number the sequences of a group and return the ones to lay out: an episode without a branch has no tokens."""
        with_tokens, indices = [], dict[str, int]()  # the group of each role
        for episode in group.episodes:
            if episode.status is Status.FAILED:
                raise DataError(f"group {group.uid!r} has a failed episode ({episode.error}); drop or retry it first")
            self.turns |= any(span.reward for span in [span for span in episode.spans if span.trained][:-1])
            role = None
            for branch in episode.branches_or_empty:
                if branch.role != role:
                    role = branch.role
                    self.episodes.append(episode)
                if role not in indices:
                    indices[role] = len(self.uids)
                    self.uids.append(f"{group.uid}#{role}" if role else group.uid)
                reward = episode.reward_of(role)
                tokens = array("i")
                for span in takewhile(lambda span: not span.trained, branch.spans):
                    tokens.extend(span.tokens)
                number, index = len(self.sequences), len(self.episodes) - 1
                self.sequences.append(_Sequence(number, indices[role], reward, group.uid, index, branch, tokens))
                with_tokens += self.sequences[-1:] if episode.branches else []
        return with_tokens

    def add(self, sequences: Sequence[_Sequence], parent: int, depth: int, least: int) -> None:
        """Add sequences whose first ``depth`` tokens end at ``parent``: first their common continuation, if it has at
        least ``least`` tokens, then, recursively, the subsets that share the next token, then single sequences."""
        common = common_prefix([sequence.leading for sequence in sequences])
        if len(sequences) > 1 and len(common) - depth >= least:
            parent, depth = self.add_shared(common[depth:], parent, sequences[0], depth), len(common)
        by_next_token: dict[tuple[int, ...], list[_Sequence]] = {}
        for sequence in sequences:
            following = sequence.leading[len(common) :][:1]
            by_next_token.setdefault(tuple(following or (-1, sequence.number)), []).append(sequence)
        for subset in by_next_token.values():
            if len(subset) > 1:
                self.add(subset, parent, depth, MIN_COMMON_PREFIX)
            else:
                self.add_unshared(subset[0], parent, depth)

    def add_shared(self, tokens: Sequence[int], parent: int, first: _Sequence, depth: int) -> int:
        """Add a shared segment: the tokens of ``first``, and of other sequences, from ``depth``. The expert ids are
        taken from ``first``."""
        self.pieces.append(Span(tokens, False, experts=_experts_of(first, depth, depth + len(tokens))))
        self.branches.append(first.trajectory)
        return self._segment(len(tokens), parent, sequence=-1)

    def add_unshared(self, sequence: _Sequence, parent: int, shared: int) -> None:
        """Add the tokens of a sequence after its first ``shared`` ones."""
        size = 0
        for span in sequence.trajectory.spans:
            skip, count = max(shared - size, 0), len(span.tokens)
            if span.logprobs is not None:
                self.sampled = True
                if len(span.logprobs) != count:
                    raise DataError(
                        f"group {sequence.uid!r}: {count} sampled tokens with {len(span.logprobs)} log-probs"
                    )
            if skip < count:
                self.pieces.append(_drop_first(span, skip) if skip else span)
                self.branches.append(sequence.trajectory)
            size += count
        if not size:
            raise DataError(f"group {sequence.uid!r} has a trajectory without tokens")
        if size > shared:
            self._segment(size - shared, parent, sequence.number)

    def _segment(self, length: int, parent: int, sequence: int) -> int:
        self.position.append(0 if parent < 0 else self.position[parent] + self.length[parent])
        self.length.append(length)
        self.parent.append(parent)
        self.sequence.append(sequence)
        return len(self.parent) - 1

    def columns(self) -> dict[str, Any]:
        """Return the columns of the batch by name."""
        length, parent = _whole(self.length), _whole(self.parent)
        start = length.cumsum(0) - length
        counts = _whole([len(piece.tokens) for piece in self.pieces])
        trains = torch.tensor([piece.trained for piece in self.pieces], dtype=torch.bool)
        trained = repeated(trains, counts, sum(self.length))
        trained[start[parent < 0]] = False  # nothing predicts the first token of a root
        turn_rewards = None
        if self.turns:
            turn_rewards = torch.zeros(len(trained), dtype=torch.float64)
            turn_rewards[counts.cumsum(0) - 1] = _numbers([piece.reward for piece in self.pieces])
        logprobs = [piece.logprobs for piece in self.pieces]
        experts = experts_per_token(self.pieces)
        episodes = [self.episodes[sequence.episode] for sequence in self.sequences]
        before = [_replies_before(sequence.trajectory) for sequence in self.sequences]
        names = dict.fromkeys(name for episode in episodes for name in episode.scores)
        tokens = _joined([piece.tokens for piece in self.pieces], torch.int32, counts)
        images: tuple[str, ...] = ()
        image = None
        if len(tokens) and int(tokens.min()) < 0:
            images, of_token = images_of(
                [piece.tokens for piece in self.pieces], [image_urls(branch.messages) for branch in self.branches]
            )
            image = torch.from_numpy(of_token)
        return {
            "group_uids": tuple(self.uids),
            "tokens": tokens,
            "images": images,
            "image": image,
            "trained": trained,
            "segment_start": start,
            "segment_parent": parent,
            "segment_position": _whole(self.position),
            "segment_sequence": _whole(self.sequence),
            "group": _whole([sequence.group for sequence in self.sequences]),
            "episode": _whole([sequence.episode for sequence in self.sequences]),
            "reward": _numbers([sequence.reward for sequence in self.sequences]),
            "truncated": torch.tensor([episode.status is Status.TRUNCATED for episode in episodes], dtype=torch.bool),
            "scores": {name: _numbers([_score(episode, name) for episode in episodes]) for name in names},
            "turn_rewards": turn_rewards,
            "replies_before": _whole(before) if any(before) else None,
            "experts": None if experts is None else torch.from_numpy(experts),
            "rollout_logprobs": _joined(logprobs, torch.float32, counts) if self.sampled else None,
        }


def _score(episode: Episode, name: str) -> float:
    return episode.scores.get(name, 0.0 if episode.status is Status.TRUNCATED else float("nan"))


def _replies_before(branch: Trajectory) -> int:
    """Return the number of sampled replies before the first trained token: the context that a branch inherits."""
    return sum(span.logprobs is not None for span in takewhile(lambda span: not span.trained, branch.spans))


def _drop_first(span: Span, count: int) -> Span:
    """Return the span without its first ``count`` tokens."""
    experts = span.experts and encode(decode(span.experts)[count:])
    return replace(span, tokens=span.tokens[count:], logprobs=span.logprobs and span.logprobs[count:], experts=experts)


def _experts_of(sequence: _Sequence, start: int, end: int) -> str | None:
    experts = experts_per_token(takewhile(lambda span: not span.trained, sequence.trajectory.spans))
    return None if experts is None else encode(experts[start:end])


def _whole(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _joined(pieces: Iterable[Sequence[float] | None], dtype: "torch.dtype", counts: Tensor) -> Tensor:
    """Return the numbers of all pieces in one tensor, 0 for a piece that is None. [pieces] -> [sum of counts]"""
    result = torch.zeros(int(counts.sum()), dtype=dtype)
    into = result.numpy()
    for piece, end, count in zip(pieces, counts.cumsum(0).tolist(), counts.tolist(), strict=True):
        if piece is not None:
            into[end - count : end] = piece
    return result


def sequences_below(parent: Tensor, sequence: Tensor) -> Tensor:
    """Return how many sequences have each segment: one, or all that share it. Arguments and result: [segments] int64"""
    counts = [int(number >= 0) for number in sequence.tolist()]
    for segment, above in reversed([*enumerate(parent.tolist())]):  # children come after their parents
        if above >= 0:
            counts[above] += counts[segment]
    return _whole(counts)


def paths(start: Tensor, length: Tensor, parent: Tensor, sequence: Tensor, sequences: int) -> list[Tensor]:
    """Return the token indices of each sequence in order, shared tokens first: S tensors, [n] each, empty for a
    sequence without unshared tokens. The first four describe the segments, [segments] int64."""
    starts, lengths = start.tolist(), length.tolist()
    runs: list[Tensor] = []  # of each segment, with its ancestors
    paths = [torch.zeros(0, dtype=torch.long)] * sequences
    for segment, (above, of) in enumerate(zip(parent.tolist(), sequence.tolist(), strict=True)):
        tokens = torch.arange(starts[segment], starts[segment] + lengths[segment])
        runs.append(tokens if above < 0 else torch.cat([runs[above], tokens]))
        if of >= 0:
            paths[of] = runs[segment]
    return paths


def with_ancestors(kept: Tensor, parent: Tensor) -> Tensor:
    """Return the mask of the kept segments and of all their ancestors. [segments] bool and int64 ->
    [segments] bool"""
    kept = kept.clone()
    while True:  # until the parents of all kept segments are kept
        parents = parent[kept]
        parents = parents[parents >= 0]
        if bool(kept[parents].all()):
            return kept
        kept[parents] = True
