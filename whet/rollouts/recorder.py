"""Turns a step's groups, after learning, into records that people can read: text, rewards, and for each sampled token
what the sampler and the learner thought of it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from whet.batch import Batch
from whet.data.renderer import Renderer
from whet.metrics.rollout_file import RolloutRecord, Turn
from whet.types import Group, Status


def records(step: int, groups: Sequence[Group], batch: Batch, renderer: Renderer) -> Iterator[RolloutRecord]:
    """One record per branch, in the order of ``batch``, which was made from ``groups``."""
    trained = iter(batch.trained_tokens.split(batch.trained_per_sequence.tolist()))
    for group in groups:
        branches = [(s, b, episode) for s, episode in enumerate(group.episodes) for b in range(len(episode.branches))]
        for sample, branch, episode in branches:
            own = next(trained)
            advantages = _picked(batch.advantages, own)
            trajectory = episode.branches[branch]
            sampled = [span for span in trajectory.spans if span.logprobs is not None]
            tokens = [token for span in sampled for token in span.tokens]
            versions = [span.versions for span in sampled if span.versions]
            learner = _picked(batch.old_logprobs, own)
            yield RolloutRecord(
                step=step,
                uid=group.uid,
                task=group.task.uid,
                sample=sample,
                branch=branch,
                prompt=renderer.decode(trajectory.spans[0].tokens),
                answer=renderer.decode(tokens),
                messages=trajectory.messages,
                tools=trajectory.tools,
                reward=episode.reward,
                advantage=advantages[0] if advantages else None,
                scores=episode.scores,
                status=episode.status.value,
                limit=episode.limit,
                turns=[Turn(len(span.tokens), span.reward, span.versions) for span in sampled],
                tokens=tokens,
                texts=[renderer.decode([token]) for token in tokens],
                logprobs=[value for span in sampled for value in span.logprobs or []],
                learner_logprobs=list(learner) if len(learner or ()) == len(tokens) and learner else None,
                versions=(min(v[0] for v in versions), max(v[1] for v in versions)) if versions else None,
            )


def failures(step: int, lost: Sequence[Group]) -> Iterator[RolloutRecord]:
    """One record per failed episode of groups that were lost: the task's own words, and why. No tokens, no reward."""
    for group in lost:
        for sample, episode in enumerate(group.episodes):
            if episode.status is Status.FAILED:
                yield RolloutRecord(
                    step=step,
                    uid=group.uid,
                    task=group.task.uid,
                    sample=sample,
                    prompt="\n".join(message["content"] for message in group.task.prompt),
                    messages=group.task.prompt,
                    status=episode.status.value,
                    error=episode.error,
                )


def _picked(column: Tensor | None, own: Tensor) -> list[float] | None:
    return None if column is None else column[own].tolist()
