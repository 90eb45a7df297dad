"""Makes readable records of a step's groups after training: text, rewards, and for each sampled token the log-probs of
the sampler and of the learner."""

import math
import reprlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.content import words_of
from whet.core.types import Group, Span, Status, Task, Trajectory
from whet.metrics.rollout_file import RolloutRecord, Turn

_MOST_FIELDS, _MOST_CHARACTERS = 12, 400  # of a task's data
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 6
_SHORT.maxlevel = 3


def records(step: int, groups: Sequence[Group], batch: Batch, renderer: Renderer) -> Iterator[RolloutRecord]:
    """Yield one record per branch, in the order of ``batch``, which was made from ``groups``."""
    trained = _at_trained(batch)
    for group in groups:
        data = _in_short(group.task.columns)
        branches = [
            (sample, branch, trajectory)
            for sample, episode in enumerate(group.episodes)
            for branch, trajectory in enumerate(episode.branches_or_empty)
        ]
        for sample, branch, trajectory in branches:
            episode, (advantages, learner) = group.episodes[sample], next(trained)
            sampled = _sampled_here(trajectory)
            tokens = [token for span in sampled for token in span.tokens]
            versions = [span.versions for span in sampled if span.versions]
            yield RolloutRecord(
                step=step,
                uid=group.uid,
                task=group.task.uid,
                sample=sample,
                branch=branch,
                role=trajectory.role,
                data=data,
                prompt=renderer.decode(trajectory.spans[0].tokens) if trajectory.spans else _words(group.task),
                answer=renderer.decode(tokens),
                messages=trajectory.messages if trajectory.spans else group.task.prompt,
                tools=trajectory.tools,
                reward=episode.reward_of(trajectory.role),
                advantage=advantages[0] if advantages else None,
                scores=episode.scores,
                status=episode.status.value,
                limit=episode.limit,
                turns=[Turn(len(span.tokens), span.reward, span.versions) for span in sampled],
                tokens=tokens,
                texts=[*map(renderer.text_of, tokens)],
                logprobs=[value for span in sampled for value in span.logprobs or []],
                learner_logprobs=[*learner] if learner and _complete(learner, len(tokens)) else None,
                versions=(min(v[0] for v in versions), max(v[1] for v in versions)) if versions else None,
            )


def failures(step: int, lost: Sequence[Group]) -> Iterator[RolloutRecord]:
    """Yield one record per failed episode of the groups that were lost: the task's prompt and the error, without tokens
    or reward."""
    for group in lost:
        for sample, episode in enumerate(group.episodes):
            if episode.status is Status.FAILED:
                yield RolloutRecord(
                    step=step,
                    uid=group.uid,
                    task=group.task.uid,
                    sample=sample,
                    data=_in_short(group.task.columns),
                    prompt=_words(group.task),
                    messages=group.task.prompt,
                    status=episode.status.value,
                    error=episode.error,
                )


def _sampled_here(branch: Trajectory) -> list[Span]:
    """Return the replies sampled in this branch. Untrained replies before them are context from another branch; if no
    reply is trained, a filter has masked the branch."""
    trained = [span for span in branch.spans if span.trained]
    return trained or [span for span in branch.spans if span.logprobs is not None]


def _in_short(data: dict[str, object]) -> dict[str, str]:
    """Return the beginning of each field as text."""
    return {str(name)[:_MOST_CHARACTERS]: _text(data[name]) for name in list(data)[:_MOST_FIELDS]}


def _text(value: object) -> str:
    if isinstance(value, str):
        more = len(value) - _MOST_CHARACTERS
        return value if more <= 0 else f"{value[:_MOST_CHARACTERS]} ... {more} more characters"
    try:
        return _SHORT.repr(value)[:_MOST_CHARACTERS]
    except Exception as error:  # a user's class may raise, and so does an integer with too many digits
        return f"a {type(value).__name__} that can't be shown: {type(error).__name__}"


def _words(task: Task) -> str:
    return "\n".join(words_of(message["content"]) for message in task.prompt)


def _complete(logprobs: list[float], tokens: int) -> bool:
    """Return whether each token has a log-prob. The learner skips sequences without gradient, whose log-probs are
    nan."""
    return len(logprobs) == tokens and not any(map(math.isnan, logprobs))


def _at_trained(batch: Batch) -> Iterator[tuple[list[float] | None, list[float] | None]]:
    """Yield the advantages and the learner's log-probs of the trained tokens of each sequence."""
    for part in batch.parts():
        advantages = part.advantages
        for indices in part.trained_tokens.split(part.trained_per_sequence.tolist()):
            yield _picked(advantages, indices), _picked(part.old_logprobs, indices)


def _picked(column: Tensor | None, indices: Tensor) -> list[float] | None:
    return None if column is None else column[indices].tolist()
