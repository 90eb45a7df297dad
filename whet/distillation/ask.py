"""Asks teachers about a batch: for their likeliest tokens at each place, or for the log-probs of the tokens that are
there. Each group is scored by one teacher, or by all, whose probabilities are mixed. Every log-prob is under the
batch's distribution, so that a student that equals its teacher has nothing to learn."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whet.base.errors import DataError
from whet.core.batch import Batch
from whet.core.types import Episode, Group
from whet.distillation.mixture import mixture, span_shares, top_of_mixture
from whet.distillation.retokenize import Retokenized, retokenize
from whet.distillation.teacher import Teacher
from whet.distillation.vocabulary import renderer_of, same_tokens, tokenizer_of
from whet.learner.base import Scorer, Top

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LoadedTeacher:
    """A teacher with the learner that holds its model."""

    name: str
    settings: Teacher
    learner: Scorer


Teachers = tuple[LoadedTeacher, ...]


async def ask(
    batch: Batch, groups: Sequence[Group], teachers: Sequence[Teachers], student: Scorer, columns: Set[str], top: Top
) -> None:
    """Fill ``columns`` of the batch made from ``groups``: ``topk_ids`` and ``teacher_logprobs`` [N, K],
    ``teacher_token_logprobs`` [N]; 0 where untrained. ``teachers`` holds those of each group. Where one of them has
    other tokens than the student, ``old_logprobs`` are filled, too."""
    unlike = any(not same_tokens(student.facts.model, one.settings) for several in set(teachers) for one in several)
    if unlike and batch.old_logprobs is None:
        batch.old_logprobs = (await student.score(batch, {"logprobs"}))["logprobs"]
    found: dict[str, Tensor] = {}
    for several in dict.fromkeys(teachers):
        members = [index for index, other in enumerate(teachers) if other == several]
        part, kept = batch.select(torch.isin(batch.group, torch.tensor(members)).nonzero().squeeze(1))
        if not bool(part.trained.any()):
            continue
        said: dict[str, Tensor] = {}
        if "topk_ids" in columns:
            said["topk_ids"], said["teacher_logprobs"] = await likeliest_tokens(part, several, top)
        if "teacher_token_logprobs" in columns:
            own = [groups[index] for index in members]
            said["teacher_token_logprobs"] = await token_logprobs(part, own, several, student)
        for name, column in said.items():
            found.setdefault(name, column.new_zeros(len(batch), *column.shape[1:]))[kept] = column
    for name in columns:
        batch.fill(name, found.get(name, torch.zeros(len(batch))))


async def likeliest_tokens(batch: Batch, teachers: Teachers, top: Top) -> tuple[Tensor, Tensor]:
    """Return the ``top.k`` likeliest tokens of the teachers' mixture at each place, among those that at least one of
    them names, and their log-probs under the mixture: [N, K] each, 0 where untrained. Something must be trained."""
    named = [await one.learner.score(batch, {"topk_ids", "topk"}, top) for one in teachers]
    if len(teachers) == 1:
        return named[0]["topk_ids"], named[0]["topk"]
    union = torch.cat([one["topk_ids"] for one in named], dim=1)
    asked = replace(batch)
    asked.fill("topk_ids", union)
    said = torch.stack([(await one.learner.score(asked, {"topk"}))["topk"] for one in teachers])
    ids, logprobs = torch.zeros_like(union[:, : top.k]), said.new_zeros(len(batch), top.k)
    trained, weights = batch.trained, [one.settings.weight for one in teachers]
    ids[trained], logprobs[trained] = top_of_mixture(union[trained], said[:, trained], weights, top.k)
    return ids, logprobs


async def token_logprobs(batch: Batch, groups: Sequence[Group], teachers: Teachers, student: Scorer) -> Tensor:
    """Return the log-probs of the batch's own tokens under the teachers' mixture, [N] float64."""
    said = []
    for one in teachers:
        if same_tokens(student.facts.model, one.settings):
            said.append((await one.learner.score(batch, {"logprobs"}))["logprobs"].double())
        else:
            said.append(await _through_text(batch, groups, one, student))
    return mixture(torch.stack(said), [one.settings.weight for one in teachers])


async def _through_text(batch: Batch, groups: Sequence[Group], teacher: LoadedTeacher, student: Scorer) -> Tensor:
    """For a teacher with other tokens: the student's log-probs, changed by what the two disagree about the span of text
    that each token is part of, in equal shares. [N]"""
    ours, theirs = tokenizer_of(student.facts.model), renderer_of(teacher.settings, teacher.settings.chat_template)
    try:
        made = [[retokenize(row, ours, theirs, group.uid) for row in group.trajectories] for group in groups]
    except DataError as error:
        raise DataError(f"teacher {teacher.name!r}: {error}") from error
    rows = [row for several in made for row in several]
    if unlike := sum(row.unlike for row in rows):
        log.warning("teacher %s can't write %d replies as they are; each is scored as a whole", teacher.name, unlike)
    there = Batch.from_groups(
        [
            replace(group, episodes=[Episode([row.trajectory] if row.trajectory.spans else []) for row in several])
            for group, several in zip(groups, made, strict=True)
        ],
        share_prompts=teacher.learner.facts.forest,
        distribution=batch.distribution,
    )
    said = (await teacher.learner.score(there, {"logprobs"}))["logprobs"]
    at, spans = _spans_of_tokens(batch, rows, [row.ours for row in rows])
    at_there, spans_there = _spans_of_tokens(there, rows, [row.theirs for row in rows])
    result = batch.column("old_logprobs").double()
    count = sum(row.spans for row in rows)
    result[at] += span_shares(result[at], spans, said[at_there].double(), spans_there, count)
    return result


def _spans_of_tokens(batch: Batch, rows: Sequence[Retokenized], known: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """The trained tokens of a batch, sequence by sequence, and their spans, counted over all sequences. [T] each"""
    first, spans = 0, list[int]()
    for row, own, count in zip(rows, known, batch.trained_per_sequence.tolist(), strict=True):
        spans += [first + span for span in own[len(own) - count :]]  # nothing predicts the very first token
        first += row.spans
    return batch.trained_tokens, torch.tensor(spans, dtype=torch.long)
