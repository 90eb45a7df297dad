"""What teachers say about a batch: the likeliest tokens at each place, or the log-probs of the tokens that are there.
Each group is judged by one teacher, or by all, whose probabilities are mixed. Every log-prob is under the batch's
distribution, so that a student that equals its teacher has nothing to learn."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.algorithms.mixture import mixture, span_shares, top_of_mixture
from whet.algorithms.retelling import Retold, retell
from whet.algorithms.vocabulary import renderer_of, same_tokens, tokenizer_of
from whet.batch import Batch
from whet.errors import DataError
from whet.learner.base import Scorer, Top
from whet.types import Group

if TYPE_CHECKING:
    from whet.algorithms.teachers import Teacher

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Judge:
    """A teacher with the model that speaks for it."""

    name: str
    teacher: "Teacher"
    learner: Scorer


Panel = tuple[Judge, ...]


async def ask(
    batch: Batch, groups: Sequence[Group], panels: Sequence[Panel], student: Scorer, columns: Set[str], top: Top
) -> dict[str, Tensor]:
    """The teacher columns of a batch: ``topk_ids``, ``teacher_logprobs`` [N, K] and ``teacher_token_logprobs`` [N],
    0 where untrained. ``panels`` holds each group's judges."""
    found: dict[str, Tensor] = {}
    for panel in dict.fromkeys(panels):
        members = [index for index, other in enumerate(panels) if other == panel]
        sequences = torch.isin(batch.group, torch.tensor(members)).nonzero().squeeze(1)
        part, kept = batch.select(sequences)
        if not bool(part.trained.any()):
            continue
        said: dict[str, Tensor] = {}
        if "topk_ids" in columns:
            said["topk_ids"], said["teacher_logprobs"] = await likeliest_tokens(part, panel, top)
        if "teacher_token_logprobs" in columns:
            own = [groups[index] for index in members]
            said["teacher_token_logprobs"] = await token_logprobs(part, own, panel, student)
        for name, column in said.items():
            found.setdefault(name, column.new_zeros(len(batch), *column.shape[1:]))[kept] = column
    return {name: found.get(name, torch.zeros(len(batch))) for name in columns}


async def likeliest_tokens(batch: Batch, judges: Panel, top: Top) -> tuple[Tensor, Tensor]:
    """The ``top.k`` likeliest tokens of the judges' mixture at each place, among those that at least one of them names,
    and their log-probs under the mixture: [N, K] each, 0 where untrained. Something must be trained."""
    named = [await judge.learner.score(batch, {"topk_ids", "topk"}, top) for judge in judges]
    if len(judges) == 1:
        return named[0]["topk_ids"], named[0]["topk"]
    union = torch.cat([one["topk_ids"] for one in named], dim=1)
    asked = replace(batch)
    asked.fill("topk_ids", union)
    said = torch.stack([(await judge.learner.score(asked, {"topk"}))["topk"] for judge in judges])
    ids, logprobs = torch.zeros_like(union[:, : top.k]), said.new_zeros(len(batch), top.k)
    trained, weights = batch.trained, [judge.teacher.weight for judge in judges]
    ids[trained], logprobs[trained] = top_of_mixture(union[trained], said[:, trained], weights, top.k)
    return ids, logprobs


async def token_logprobs(batch: Batch, groups: Sequence[Group], judges: Panel, student: Scorer) -> Tensor:
    """Log-probs of the batch's own tokens under the judges' mixture, [N] float64. ``groups`` are those that it was made
    from; ``old_logprobs`` must be filled where a judge has other tokens than the student."""
    said = []
    for judge in judges:
        if same_tokens(student.facts.model, judge.teacher):
            said.append((await judge.learner.score(batch, {"logprobs"}))["logprobs"].double())
        else:
            said.append(await _through_text(batch, groups, judge, student))
    return mixture(torch.stack(said), [judge.teacher.weight for judge in judges])


async def _through_text(batch: Batch, groups: Sequence[Group], judge: Judge, student: Scorer) -> Tensor:
    """For a teacher with other tokens: the student's log-probs, changed by what the two disagree about the span of text
    that each token is part of, in equal shares. [N]"""
    ours, theirs = tokenizer_of(student.facts.model), renderer_of(judge.teacher, judge.teacher.chat_template)
    try:
        told = [[retell(one, ours, theirs, group.uid) for one in group.trajectories] for group in groups]
    except DataError as error:
        raise DataError(f"teacher {judge.name!r}: {error}") from error
    flat = [one for several in told for one in several]
    unlike = sum(one.unlike for one in flat)
    if unlike:
        log.warning("teacher %s can't write %d replies as they are; each is judged as a whole", judge.name, unlike)
    there = Batch.from_groups(
        [replace(g, trajectories=[one.trajectory for one in several]) for g, several in zip(groups, told, strict=True)],
        share_prompts=judge.learner.facts.forest,
        distribution=batch.distribution,
    )
    said = (await judge.learner.score(there, {"logprobs"}))["logprobs"]
    assert batch.old_logprobs is not None
    at, spans = _spans_of_tokens(batch, flat, [one.ours for one in flat])
    at_there, spans_there = _spans_of_tokens(there, flat, [one.theirs for one in flat])
    result = batch.old_logprobs.double()
    count = sum(one.spans for one in flat)
    result[at] += span_shares(result[at], spans, said[at_there].double(), spans_there, count)
    return result


def _spans_of_tokens(batch: Batch, told: Sequence[Retold], known: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """The trained tokens of a batch, sequence by sequence, and their spans, counted over all sequences. [T] each"""
    trained = batch.trained.nonzero().squeeze(1)
    first, spans = 0, list[int]()
    for one, own, count in zip(told, known, batch.trained_per_sequence.tolist(), strict=True):
        spans += [first + span for span in own[len(own) - count :]]  # nothing predicts the very first token
        first += one.spans
    return trained[torch.argsort(batch.sequence[trained], stable=True)], torch.tensor(spans, dtype=torch.long)
