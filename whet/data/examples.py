"""Rows for supervised fine-tuning and preference learning, as groups of trajectories.

A supervised row is a group of one trained trajectory; a preference pair a group of two with rewards 1 and 0. They are
rendered turn by turn, exactly as a rollout would append them, so that a model is trained on the tokens it will sample.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from whet.data.base import Data
from whet.data.jsonl import Row, Tally, read_rows
from whet.data.messages import preference_messages, supervised_messages, tools_of
from whet.data.renderer import Renderer
from whet.data.source import MappedRows
from whet.errors import DataError
from whet.seeds import derive_seed
from whet.types import Group, Message, Span, Task, Trajectory

log = logging.getLogger(__name__)

_CONVERSATION = ("messages", "prompt", "completion", "chosen", "rejected")
TrainOn = Literal["assistant", "last_assistant", "all"]


class Rows(Data, ABC):
    """A file of examples, and those of them that are held out to measure on. Subclasses say how a row becomes a group.

    No prompt is in both splits, not even where the files share it: rows with one prompt stay together.
    """

    path: str
    """A JSONL file, or ``hf:name:config:split`` for a data set on the Hugging Face Hub."""
    test_path: str | None = None
    """Rows to measure on; None: some rows of ``path`` are held out, chosen by a hash of their prompts."""
    test_size: int = Field(default=64, ge=0)
    """About so many rows to measure on at most; held out of ``path``, never more than a tenth of it."""
    columns: dict[str, str] = Field(default={})
    """What the fields are called in the file, where they have other names: ``{prompt: question}``."""
    train_on: TrainOn = "assistant"
    """Every reply, the last one only, or all tokens but the first. A reward model reads conversations as a whole."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longer rows are left out, and counted."""
    batch_size: int = Field(default=8, gt=0)
    """Rows that one step learns from."""

    @property
    def groups_per_step(self) -> int:
        return self.batch_size

    @abstractmethod
    def group(self, row: Row, renderer: Renderer) -> Group:
        """The group of a row. Raises ``DataError`` naming the row and field."""

    @abstractmethod
    def question(self, row: Row) -> list[Message]:
        """The messages that are replied to: rows with the same ones belong to the same split."""

    def check(self, row: Row) -> None:
        """Raises ``DataError`` naming the row and field for what isn't there or of another type. All rows are checked
        before the first step."""
        self.question(row)

    def groups(
        self, renderer: Renderer, split: Literal["train", "test"] = "train", *, judging: bool = False
    ) -> MappedRows[Row]:
        """One group per row of the split, rendered when drawn; with ``judging`` laid out for a reward model. Raises
        ``DataError`` for a file that can't be read."""

        def bounded(row: Row) -> Group | str:
            group = self.group(row, renderer)
            if judging:
                group = judged(group, renderer)
            tokens = [trajectory.tokens for trajectory in group.trajectories]
            if self.max_tokens is not None and max(map(len, tokens)) > self.max_tokens:
                return self._left_out(row, f"longer than {self.max_tokens} tokens")
            if not all(trajectory.trained_tokens for trajectory in group.trajectories):
                return self._left_out(row, "without a token to train")
            if len(tokens) > 1 and all(one == tokens[0] for one in tokens):
                return self._left_out(row, "chosen and rejected are the same tokens")
            return group

        return MappedRows(self._splits[split], bounded)

    def _left_out(self, row: Row, reason: str) -> str:
        """The reason, which is shown the first time; ``log.txt`` names every row."""
        first = reason not in self._reasons
        self._reasons.add(reason)
        log.log(
            logging.WARNING if first else logging.INFO,
            f"{row.where} is left out: {reason}" + (" (further such rows are named in log.txt)" if first else ""),
        )
        return reason

    @cached_property
    def _reasons(self) -> set[str]:
        return set()

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        train = self._read(self.path)
        asked = [self._key(row) for row in train]
        if self.test_path is not None:
            test = self._read(self.test_path)[: self.test_size]
            held_out = {self._key(row) for row in test}
        else:
            held_out = _first_rows(asked, min(self.test_size, len(train) // 10))
            test = [row for row, key in zip(train, asked, strict=True) if key in held_out]
        kept = [row for row, key in zip(train, asked, strict=True) if key not in held_out]
        tally = Tally(self.path, len(train))
        tally.drop("with a prompt of the test split", len(train) - len(kept))
        tally.report(len(kept))
        return {"train": kept, "test": test}

    def _read(self, path: str) -> list[Row]:
        rows = [Row(row.where, self._renamed(row.values)) for row in read_rows(path)]
        for row in rows:
            self.check(row)
        return rows

    def _renamed(self, values: dict[str, Any]) -> dict[str, Any]:
        """``columns`` wins over a field of the file that has the name already."""
        found = {name: values[there] for name, there in self.columns.items() if there in values}
        renamed = set(self.columns.values())
        return found | {name: value for name, value in values.items() if name not in found.keys() | renamed}

    def _key(self, row: Row) -> int:
        asked = [[message["role"], " ".join(message["content"].split())] for message in self.question(row)]
        return derive_seed("held out", json.dumps(asked))


class ReplyRows(Rows):
    """Rows of ``messages``, or of ``prompt`` and ``completion`` (each a text or a list of messages), and optionally
    ``tools``: what rows of one conversation have in common."""

    def group(self, row: Row, renderer: Renderer) -> Group:
        return supervised_group(row, renderer, self.train_on)

    def question(self, row: Row) -> list[Message]:
        return supervised_messages(row)[0][:-1]


class SupervisedRows(ReplyRows):
    """Conversations whose replies are to be learned."""


class ScoredRows(ReplyRows):
    """Conversations with a number ``score``, which a reward model learns to give the last reply."""

    train_on: TrainOn = "last_assistant"

    def check(self, row: Row) -> None:
        super().check(row)
        row.number("score")

    def group(self, row: Row, renderer: Renderer) -> Group:
        group = super().group(row, renderer)
        group.trajectories[0].reward = row.number("score")
        return group


class LabelledRows(ReplyRows):
    """Conversations with a ``label``: true where the last reply is good, false where it is bad."""

    train_on: TrainOn = "last_assistant"

    def check(self, row: Row) -> None:
        super().check(row)
        row.flag("label")

    def group(self, row: Row, renderer: Renderer) -> Group:
        group = super().group(row, renderer)
        group.trajectories[0].reward = float(row.flag("label"))
        return group


class PreferenceRows(Rows):
    """Rows of ``chosen`` and ``rejected`` (each a text or a list of messages) and their ``prompt``; without one, the
    messages both begin with are the prompt."""

    train_on: TrainOn = "last_assistant"

    def group(self, row: Row, renderer: Renderer) -> Group:
        return preference_group(row, renderer, self.train_on)

    def question(self, row: Row) -> list[Message]:
        return preference_messages(row)[0]


def supervised_group(row: Row, renderer: Renderer, train_on: TrainOn = "assistant") -> Group:
    """A group of one. Raises ``DataError`` naming the row and field."""
    messages, name = supervised_messages(row)
    trajectory = render_conversation(row, name, messages, renderer, train_on)
    return Group(uid=row.where, task=_task(row, messages[:-1]), trajectories=[trajectory])


def preference_group(row: Row, renderer: Renderer, train_on: TrainOn = "last_assistant") -> Group:
    """The chosen answer with reward 1, then the rejected one with reward 0. Raises ``DataError`` naming the row and
    field."""
    prompt, chosen, rejected = preference_messages(row)
    trajectories = []
    for name, answer, reward in (("chosen", chosen, 1.0), ("rejected", rejected, 0.0)):
        trajectory = render_conversation(row, name, prompt + answer, renderer, train_on)
        trajectory.reward = reward
        trajectories.append(trajectory)
    return Group(uid=row.where, task=_task(row, prompt), trajectories=trajectories)


def judged(group: Group, renderer: Renderer) -> Group:
    """The group as a reward model reads it: each conversation as the chat template writes it, and one token more. That
    token is the only trained one. It is never seen, as nothing follows it: it holds the place whose predictor is the
    conversation's last token, where the score is read."""
    trajectories = []
    for trajectory in group.trajectories:
        tokens = renderer.render_whole(trajectory.messages, group.task.data.get("tools"))
        spans = [Span(tokens, trained=False), Span(tokens[-1:], trained=True)]
        trajectories.append(replace(trajectory, spans=spans))
    return replace(group, trajectories=trajectories)


def render_conversation(
    row: Row, name: str, messages: list[Message], renderer: Renderer, train_on: TrainOn
) -> Trajectory:
    """The spans of a checked conversation, as a rollout would have appended them. Raises ``DataError`` naming the row
    where the chat template can't render it, or leaves out tools, their calls or their results."""
    tools = tools_of(row)
    try:
        spans = _spans(messages, tools, renderer, train_on)
    except DataError as error:
        raise DataError(f"{row.where}: field {name!r}: {error}") from error
    if lost := renderer.left_out(messages, tools):
        raise DataError(f"{row.where}: field {name!r}: the chat template leaves out {lost}; give one that supports it")
    return Trajectory(spans, messages=messages)


def _spans(
    messages: list[Message], tools: list[dict[str, Any]] | None, renderer: Renderer, train_on: TrainOn
) -> list[Span]:
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[Span] = []
    history: list[int] = []
    done = 0
    for index in replies:
        new = messages[done:index]
        given = renderer.render_next(history, new) if done else renderer.render_prompt(new, tools)
        reply = renderer.render_reply(messages[:index], messages[index], tools)
        trained = train_on != "last_assistant" or index == replies[-1]
        spans += [Span(given, trained=train_on == "all"), Span(reply, trained=trained)]
        history += given + reply
        done = index + 1
    if train_on == "all":  # nothing predicts the first token
        first = spans[0].tokens
        spans[:1] = [Span(first[:1], trained=False), Span(first[1:], trained=True)]
    return spans


def _task(row: Row, prompt: list[Message]) -> Task:
    """What the row holds beside the conversation goes along; ``tools`` only where there are any."""
    facts = {field: value for field, value in row.values.items() if field not in _CONVERSATION}
    return Task(row.where, prompt, {field: value for field, value in facts.items() if field != "tools" or value})


def _first_rows(keys: list[int], count: int) -> set[int]:
    """The smallest keys, of at most ``count`` rows together."""
    chosen: set[int] = set()
    room = count
    for key, rows in sorted(Counter(keys).items()):
        if rows <= room:
            chosen.add(key)
            room -= rows
    return chosen
