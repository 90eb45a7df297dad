"""The records that people read of a step: each branch of an episode with its own replies."""

from dataclasses import replace

import torch

from tests.tiny import tiny_tokenizer
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Span, Status, Task, Trajectory
from whet.rollouts.filters import OverlongFilter
from whet.rollouts.recorder import records

RENDERER = Renderer(tiny_tokenizer())


def said(text: str) -> Span:
    tokens = RENDERER.encode_text(text)
    return Span(tokens, True, [-1.0] * len(tokens), (0, 0))


def asked(text: str) -> Span:
    return Span(RENDERER.encode_text(text), False)


def two_lines(status: Status = Status.COMPLETED) -> Group:
    """An agent that asks once and then continues in a branch."""
    question, draft = asked("why? "), said("because")
    branch = [question, replace(draft, trained=False), asked(" and? "), said("so")]
    lines = [Trajectory([question, draft]), Trajectory(branch)]
    return Group("g", Task("t", []), [Episode(lines, 1.0, status=status)])


def test_a_branch_is_recorded_with_its_own_replies_and_what_the_learner_thought_of_them() -> None:
    batch = Batch.from_groups([group := two_lines()])
    batch.old_logprobs = torch.arange(len(batch)).float()
    first, second = records(1, [group], batch, RENDERER)
    assert (first.answer, second.answer) == ("because", "so")
    assert [len(turn.logprobs) for turn in (first, second)] == [7, 2]
    assert second.learner_logprobs == batch.old_logprobs[batch.trained][-2:].tolist()
    assert [turn.tokens for turn in second.turns] == [2]


def test_a_reply_that_a_filter_keeps_from_training_is_recorded_all_the_same() -> None:
    masked = OverlongFilter()(two_lines(Status.TRUNCATED))
    assert masked is not None
    first, _ = records(1, [masked], Batch.from_groups([masked]), RENDERER)
    assert first.answer == "because"
    assert first.learner_logprobs is None


def test_the_data_of_a_task_is_recorded_in_short() -> None:
    data = {"answer": "42", "tests": ["x" * 10_000] * 10_000, "source": "y" * 1000, "huge": 10**5000, "odd": {1: None}}
    group = two_lines()
    group.task.data = data
    first, _ = records(1, [group], Batch.from_groups([group]), RENDERER)
    assert first.data["answer"] == "42"
    assert first.data["source"].endswith(" ... 600 more characters")
    assert first.data["odd"] == "{1: None}"
    assert "int" in first.data["huge"]  # how it is described depends on the version of Python
    assert sum(map(len, first.data.values())) < 2500
