"""Lays out groups as a forest of segments: which tokens are shared, and where each sequence's own ones stand. From
lists to the columns of a ``Batch``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat, takewhile
from typing import Any

import numpy as np

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.core.expert_ids import of_tokens, read, written
from whet.core.types import Episode, Group, Span, Status, Trajectory

MIN_COMMON_PREFIX = 16  # tokens; below this, one more level of attention costs more than it saves


@dataclass(slots=True, frozen=True)
class _Sequence:
    """A sequence of the batch to be."""

    number: int
    group: int
    uid: str
    episode: int
    trajectory: Trajectory
    leading: list[int]  # the tokens before the first trained one, which it could share


def columns_of(groups: Sequence[Group], share_prompts: bool) -> dict[str, Any]:
    """Return the columns of the groups' batch. Raises ``DataError`` for a failed episode, or a trajectory whose spans
    have no tokens."""
    forest = _Forest()
    members = [several for index, group in enumerate(groups) if (several := forest.number(index, group))]
    if not share_prompts:
        for sequence in [sequence for several in members for sequence in several]:
            forest.add_own(sequence, parent=-1, shared=0)
        return forest.columns()
    prompts = [same_start([sequence.leading for sequence in several]) for several in members]
    common = same_start(prompts) if len(members) > 1 else []
    long = len(common) >= MIN_COMMON_PREFIX
    root = forest.add_shared(common, -1, members[0][0], 0) if long else -1
    for several in members:
        forest.add(several, root, len(common) if root >= 0 else 0, least=1)
    return forest.columns()


def places(start: Tensor, length: Tensor) -> Tensor:
    """Return the numbers of runs: from each ``start`` [runs] on, as many as its ``length`` [runs]. -> [all of them]"""
    offset = start - (length.cumsum(0) - length)
    return torch.arange(int(length.sum())).add_(offset.repeat_interleave(length))


def predictors(start: Tensor, length: Tensor, parent: Tensor) -> Tensor:
    """Return the token before each token; of a segment's first token its parent's last one, -1 in a root. [N]"""
    last = start + length - 1
    predictor = torch.arange(int(length.sum())) - 1
    predictor[start] = torch.where(parent < 0, -1, last[parent])
    return predictor


def same_start(lists: Sequence[list[int]]) -> list[int]:
    """Return the longest common prefix; of one list the list itself."""
    if not lists:
        return []
    low, high = min(lists), max(lists)  # a prefix of the first and the last in order is a prefix of all
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


class _Forest:
    """A forest under construction, from lists of segments and sequences."""

    def __init__(self) -> None:
        self.pieces: list[Span] = []  # what each span adds to each segment
        self.length: list[int] = []  # of each segment
        self.parent: list[int] = []
        self.sequence: list[int] = []
        self.position: list[int] = []  # of its first token
        self.sequences: list[_Sequence] = []
        self.episodes: list[Episode] = []
        self.sampled = self.turns = False

    def number(self, index: int, group: Group) -> list[_Sequence]:
        """Number the sequences of a group, and return those to lay out: an episode without a branch has no tokens."""
        found = []
        for episode in group.episodes:
            if episode.status is Status.FAILED:
                raise DataError(f"group {group.uid!r} holds a failed episode ({episode.error}); drop or retry it first")
            self.turns |= any(span.reward for span in [span for span in episode.spans if span.trained][:-1])
            for branch in episode.lines:
                leading = takewhile(lambda span: not span.trained, branch.spans)
                tokens = list(chain.from_iterable(span.tokens for span in leading))
                number = len(self.sequences)
                self.sequences.append(_Sequence(number, index, group.uid, len(self.episodes), branch, tokens))
                found += self.sequences[-1:] if episode.branches else []
            self.episodes.append(episode)
        return found

    def add(self, sequences: Sequence[_Sequence], parent: int, depth: int, least: int) -> None:
        """Add sequences whose first ``depth`` tokens are those of ``parent``: what they have in common beyond, if that
        is at least ``least`` tokens, then those that go on alike, then each by itself."""
        common = same_start([sequence.leading for sequence in sequences])
        if len(sequences) > 1 and len(common) - depth >= least:
            parent, depth = self.add_shared(common[depth:], parent, sequences[0], depth), len(common)
        alike: dict[tuple[int, ...], list[_Sequence]] = {}
        for sequence in sequences:
            following = sequence.leading[len(common) :][:1]
            alike.setdefault(tuple(following or (-1, sequence.number)), []).append(sequence)
        for several in alike.values():
            if len(several) > 1:
                self.add(several, parent, depth, MIN_COMMON_PREFIX)
            else:
                self.add_own(several[0], parent, depth)

    def add_shared(self, tokens: list[int], parent: int, first: _Sequence, depth: int) -> int:
        """Add tokens that ``first`` has from ``depth`` on, and others, too. The experts are those of ``first``."""
        self.pieces.append(Span(tokens, False, experts=_experts_of(first, depth, depth + len(tokens))))
        return self._segment(len(tokens), parent, sequence=-1)

    def add_own(self, sequence: _Sequence, parent: int, shared: int) -> None:
        """Add the tokens of a sequence beyond its ``shared`` ones."""
        size = 0
        for span in sequence.trajectory.spans:
            known, count = max(shared - size, 0), len(span.tokens)
            if span.logprobs is not None:
                self.sampled = True
                if len(span.logprobs) != count:
                    had = len(span.logprobs)
                    raise DataError(f"group {sequence.uid!r}: {count} sampled tokens with {had} log-probs")
            if known < count:
                self.pieces.append(_beyond(span, known) if known else span)
            size += count
        if not size:
            raise DataError(f"group {sequence.uid!r} holds a trajectory without any token")
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
        trained = torch.tensor([piece.trained for piece in self.pieces], dtype=torch.bool).repeat_interleave(counts)
        trained[start[parent < 0]] = False  # nothing predicts the first token of a root
        turn_rewards = torch.zeros(len(trained), dtype=torch.float64)
        turn_rewards[counts.cumsum(0) - 1] = _numbers([piece.reward for piece in self.pieces])
        logprobs = (piece.logprobs or repeat(0.0, len(piece.tokens)) for piece in self.pieces)
        experts = of_tokens(self.pieces)
        episodes = [self.episodes[sequence.episode] for sequence in self.sequences]
        before = [_replies_before(sequence.trajectory) for sequence in self.sequences]
        names = dict.fromkeys(name for episode in episodes for name in episode.scores)
        return {
            "tokens": _joined((piece.tokens for piece in self.pieces), np.int64, len(trained)),
            "position": places(_whole(self.position), length),
            "predictor": predictors(start, length, parent),
            "sequence": _whole(self.sequence).repeat_interleave(length),
            "trained": trained,
            "segment_start": start,
            "segment_parent": parent,
            "group": _whole([sequence.group for sequence in self.sequences]),
            "episode": _whole([sequence.episode for sequence in self.sequences]),
            "reward": _numbers([episode.reward for episode in episodes]),
            "truncated": torch.tensor([episode.status is Status.TRUNCATED for episode in episodes], dtype=torch.bool),
            "scores": {name: _numbers([_score(episode, name) for episode in episodes]) for name in names},
            "turn_rewards": turn_rewards if self.turns else None,
            "replies_before": _whole(before) if any(before) else None,
            "experts": None if experts is None else torch.from_numpy(experts),
            "rollout_logprobs": _joined(logprobs, np.float32, len(trained)) if self.sampled else None,
        }


def _score(episode: Episode, name: str) -> float:
    return episode.scores.get(name, 0.0 if episode.status is Status.TRUNCATED else float("nan"))


def _replies_before(line: Trajectory) -> int:
    """Return how many sampled replies stand before the first trained token: context that a branch inherits."""
    return sum(span.logprobs is not None for span in takewhile(lambda span: not span.trained, line.spans))


def _beyond(span: Span, known: int) -> Span:
    """Return the span without its first tokens."""
    experts = span.experts and written(read(span.experts)[known:])
    return replace(span, tokens=span.tokens[known:], logprobs=span.logprobs and span.logprobs[known:], experts=experts)


def _experts_of(sequence: _Sequence, start: int, end: int) -> str | None:
    experts = of_tokens(takewhile(lambda span: not span.trained, sequence.trajectory.spans))
    return None if experts is None else written(experts[start:end])


def _whole(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _joined(pieces: Iterable[Iterable[float]], kind: type[np.generic], size: int) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(pieces), kind, size))
