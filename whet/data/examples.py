"""Rows for supervised fine-tuning and preference learning, as groups of trajectories.

A supervised row is a group of one trained trajectory; a preference pair a group of two with rewards 1 and 0. They are
rendered turn by turn, exactly as a rollout would append them, so that a model is trained on the tokens it will sample.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field

from whet.data.base import Data
from whet.data.jsonl import Row, Tally, read_rows
from whet.data.renderer import Renderer
from whet.data.source import MappedRows
from whet.seeds import derive_seed
from whet.types import Group, Message, Span, Task, Trajectory

_CONVERSATION = ("messages", "prompt", "completion", "chosen", "rejected")
TrainOn = Literal["assistant", "last_assistant", "all"]


class Rows(Data):
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

    def group(self, row: Row, renderer: Renderer) -> Group:
        """The group of a row. Raises ``DataError`` naming the row and field."""
        raise NotImplementedError

    def question(self, row: Row) -> list[Message]:
        """The messages that are replied to: rows with the same ones belong to the same split."""
        raise NotImplementedError

    def groups(
        self, renderer: Renderer, split: Literal["train", "test"] = "train", *, judging: bool = False
    ) -> MappedRows[Row]:
        """One group per row of the split, rendered when drawn; with ``judging`` laid out for a reward model. Raises
        ``DataError`` for a file that can't be read."""

        def bounded(row: Row) -> Group | str:
            group = self.group(row, renderer)
            if judging:
                group = judged(group, renderer)
            longest = max(sum(len(span.tokens) for span in trajectory.spans) for trajectory in group.trajectories)
            too_long = self.max_tokens is not None and longest > self.max_tokens
            return f"longer than {self.max_tokens} tokens" if too_long else group

        return MappedRows(self._splits[split], bounded)

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
        names = {there: name for name, there in self.columns.items()}
        return [Row(row.where, {names.get(k, k): v for k, v in row.values.items()}) for row in read_rows(path)]

    def _key(self, row: Row) -> int:
        asked = [[message["role"], " ".join(message["content"].split())] for message in self.question(row)]
        return derive_seed("held out", json.dumps(asked))


class SupervisedRows(Rows):
    """Rows of ``messages``, or of ``prompt`` and ``completion`` (each a text or a list of messages), and optionally
    ``tools``."""

    def group(self, row: Row, renderer: Renderer) -> Group:
        return supervised_group(row, renderer, self.train_on)

    def question(self, row: Row) -> list[Message]:
        return _supervised_messages(row)[0][:-1]


class ScoredRows(SupervisedRows):
    """Supervised rows with a number ``score``, which a reward model learns to give the last reply."""

    train_on: TrainOn = "last_assistant"

    def group(self, row: Row, renderer: Renderer) -> Group:
        group = super().group(row, renderer)
        group.trajectories[0].reward = row.number("score")
        return group


class PreferenceRows(Rows):
    """Rows of ``chosen`` and ``rejected`` (each a text or a list of messages) and their ``prompt``; without one, the
    messages both begin with are the prompt."""

    train_on: TrainOn = "last_assistant"

    def group(self, row: Row, renderer: Renderer) -> Group:
        return preference_group(row, renderer, self.train_on)

    def question(self, row: Row) -> list[Message]:
        return _pair(row)[0]


def supervised_group(row: Row, renderer: Renderer, train_on: TrainOn = "assistant") -> Group:
    """A group of one. Raises ``DataError`` naming the row and field."""
    messages, name = _supervised_messages(row)
    trajectory = render_conversation(row, name, messages, renderer, train_on)
    return Group(uid=row.where, task=_task(row, messages[:-1]), trajectories=[trajectory])


def preference_group(row: Row, renderer: Renderer, train_on: TrainOn = "last_assistant") -> Group:
    """The chosen answer with reward 1, then the rejected one with reward 0. Raises ``DataError`` naming the row and
    field."""
    prompt, chosen, rejected = _pair(row)
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
    """The spans of a conversation, as a rollout would have appended them. It must begin with something to reply to
    and end with a reply."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or replies[-1] != len(messages) - 1:
        raise row.problem(name, "must end with a reply of the assistant", row.values[name])
    if replies[0] == 0:
        raise row.problem(name, "must have a message before the first reply", row.values[name])
    tools: list[dict[str, Any]] | None = row.values.get("tools") or None
    spans: list[Span] = []
    history: list[int] = []
    done = 0
    for index in replies:
        new = messages[done:index]
        if not done:
            given = renderer.render_prompt(new, tools)
        elif new:
            given = renderer.render_next(history, new)
        else:
            raise row.problem(name, "must not hold two replies in a row", row.values[name])
        reply = renderer.render_reply(messages[:index], messages[index], tools)
        trained = train_on != "last_assistant" or index == replies[-1]
        spans += [Span(given, trained=train_on == "all"), Span(reply, trained=trained)]
        history += given + reply
        done = index + 1
    if train_on == "all":  # nothing predicts the first token
        first = spans[0].tokens
        spans[:1] = [Span(first[:1], trained=False), Span(first[1:], trained=True)]
    return Trajectory(spans, messages=messages)


def _task(row: Row, prompt: list[Message]) -> Task:
    """What the row holds beside the conversation goes along; ``tools`` only where there are any."""
    facts = {field: value for field, value in row.values.items() if field not in _CONVERSATION}
    return Task(row.where, prompt, {field: value for field, value in facts.items() if field != "tools" or value})


def _supervised_messages(row: Row) -> tuple[list[Message], str]:
    """The conversation, and the field that its last message stands in."""
    if "messages" in row.values:
        return _messages(row, "messages", "user"), "messages"
    return _messages(row, "prompt", "user") + _messages(row, "completion", "assistant"), "completion"


def _pair(row: Row) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, chosen and rejected answer."""
    chosen, rejected = _messages(row, "chosen", "assistant"), _messages(row, "rejected", "assistant")
    prompt = _messages(row, "prompt", "user") if "prompt" in row.values else []
    if prompt and chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        pairs = zip(chosen, rejected, strict=False)
        prompt = [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise row.problem("rejected", "must differ from the chosen answer", row.values["rejected"])
    return prompt, chosen, rejected


def _first_rows(keys: list[int], count: int) -> set[int]:
    """The smallest keys, of at most ``count`` rows together."""
    chosen: set[int] = set()
    room = count
    for key, rows in sorted(Counter(keys).items()):
        if rows <= room:
            chosen.add(key)
            room -= rows
    return chosen


def _messages(row: Row, name: str, role: str) -> list[Message]:
    """A field as messages; a text is one message of the role."""
    value = row.values.get(name)
    if isinstance(value, str):
        return [{"role": role, "content": row.text(name)}]
    if not isinstance(value, list) or not value:
        raise row.problem(name, "must be a text or a list of messages that is not empty", value)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.problem(name, "must hold messages with a 'role' and a 'content'", message)
        if not isinstance(message.get("content"), str):
            raise row.problem(name, "must hold messages whose 'content' is a text", message)
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise row.problem(name, "must not hold an empty reply", message)
    return list(value)
