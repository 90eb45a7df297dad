"""Rows for supervised fine-tuning and preference learning, as groups of trajectories.

A supervised row is a group of one trained trajectory; a preference pair a group of two with rewards 1 and 0. They are
rendered turn by turn, exactly as a rollout would append them, so that a model is trained on the tokens it will sample.
"""

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from whet.base.errors import DataError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.chat.calls import match_results
from whet.chat.renderer import Renderer
from whet.core.content import image_urls, words_of
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.core.words import composed
from whet.data.base import Data
from whet.data.order import RowOrder, TaskOrder
from whet.data.row import missing, naming_prep, read_rows
from whet.data.row_kinds import Answer, Conversation, Example, Labelled, Preference, Prompt, Scored
from whet.data.source import MappedRows
from whet.data.split import Tally, hold_out
from whet.fetch.images import fingerprint

log = logging.getLogger(__name__)

_CONVERSATION = {"system", "messages", "prompt", "completion", "chosen", "rejected", "tools"}
TrainOn = Literal["assistant", "last_assistant", "all"]
Groups = dict[Literal["train", "test"], MappedRows[Any]]


class Rows(Data):
    """Examples to train on, split into training and test rows."""

    batch_size: int = Field(default=8, gt=0, le=1_000_000)
    """Rows of one training step."""

    @property
    def groups_per_step(self) -> int:
        return self.batch_size

    @property
    def longest(self) -> int | None:
        """Return the most tokens that a row may have; None without a limit."""
        limits = [part.max_tokens for part in self.parts if isinstance(part, FileRows)]
        return None if None in limits else max(filter(None, limits))

    @abstractmethod
    def groups(self, renderer: Renderer, *, judging: bool = False) -> Groups:
        """Return one group per row of each split, rendered when drawn; with ``judging``, for a reward model. All rows
        are read and validated now. Raises ``DataError`` for a file that can't be read, or a wrong row."""

    def order(self, train: MappedRows[object], seed: int) -> RowOrder:
        """Return the order in which the training rows are drawn: shuffled in each epoch."""
        return TaskOrder(len(train), seed)


class FileRows(Rows):
    """Examples of a file. Subclasses set the kind of row.

    No prompt is in both splits, even if both files contain it: rows with the same prompt stay together.
    """

    kind: ClassVar[type[Example]]

    path: str
    """A file (JSONL, JSON, CSV, TSV, Parquet, Arrow), a folder or a pattern (``rows/*.parquet``), or
    ``hf:name:config:split`` for a data set on the Hugging Face Hub."""
    test_path: str | None = None
    """Test rows; None: some rows of ``path`` are held out, chosen by a hash of their prompts."""
    test_size: int = Field(default=64, ge=0)
    """Approximate most test rows. At most a tenth of ``path`` is held out."""
    columns: dict[str, str] = Field(default={})
    """Columns of the file with other names than the fields, as in ``{prompt: question}``."""
    train_on: TrainOn = "assistant"
    """The trained tokens: of every reply, of the last reply, or all but the first. A reward model reads whole
    conversations."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row in tokens. Longer rows are dropped, and counted."""
    image_folder: str | None = None
    """The folder that paths of images in rows begin at and stay in. None: the folder of their file."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return what is read to prepare these rows: ``path``, and sets to which its rows refer."""
        return (self.path,)

    def row(self, where: str, values: JsonObject, as_texts: bool = False) -> Example:
        """Return the row at ``where``. Raises ``DataError`` naming the first field that is wrong."""
        return self.kind.of(where, values, as_texts, self.columns, self.image_folder)

    def group(self, row: Example, renderer: Renderer) -> Group:
        """Return the group of a row: an episode for each answer. Raises ``DataError`` naming the row and field."""
        episodes = [
            Episode([render_conversation(row, answer, renderer, self.train_on)], reward=answer.reward)
            for answer in row.answers
        ]
        facts = row.model_dump(exclude=_CONVERSATION)
        return Group(uid=row.where, task=Task(row.where, row.question, facts), episodes=episodes)

    def groups(self, renderer: Renderer, *, judging: bool = False) -> Groups:
        train, held_out, tally = self.split()
        tally.report(len(train) + len(held_out))
        check_rows([*train, *held_out], renderer)
        to_group = self.bounded(renderer, judging)
        return {"train": MappedRows(train, to_group), "test": MappedRows(held_out, to_group)}

    def split(self) -> tuple[list[Example], list[Example], Tally]:
        """Return the training rows, the test rows and the count of the others."""
        rows, test = self.read()
        size = self.test_size if test is not None else min(self.test_size, len(rows) // 10)
        tally = Tally(self.path, len(rows) + len(test or []))
        return *hold_out(rows, test, size, question_key, tally), tally

    def bounded(self, renderer: Renderer, judging: bool) -> Callable[[Example], Group | str]:
        """Return the function from a row to its group, or to the reason for which it can't be trained on."""
        reasons = set[str]()

        def to_group(row: Example) -> Group | str:
            group = self.group(row, renderer)
            if judging:
                group = judged(group, renderer)
            reason = self.unusable(group)
            if reason is None:
                return group
            log.log(
                logging.INFO if reason in reasons else logging.WARNING,
                f"{row.where} is left out: {reason}"
                + ("" if reason in reasons else " (further such rows are named in log.txt)"),
            )
            reasons.add(reason)
            return reason

        return to_group

    def read(self) -> tuple[Sequence[Example], Sequence[Example] | None]:
        """Return the rows, and the rows of the test file; None without one."""

        def rows_of(path: str) -> list[Example]:
            return read_rows(path, self.kind, self.columns, image_folder=self.image_folder)

        with naming_prep():
            return rows_of(self.path), None if self.test_path is None else rows_of(self.test_path)

    def unusable(self, group: Group) -> str | None:
        """Return the reason for which a row can't be trained on, if any."""
        if too_long := self.too_long(group):
            return too_long
        tokens = [trajectory.tokens for trajectory in group.trajectories]
        if not all(trajectory.trained_tokens for trajectory in group.trajectories):
            return "without a token to train"
        if len(tokens) > 1 and all(each == tokens[0] for each in tokens):
            return "chosen and rejected are the same tokens"
        if len({episode.reward for episode in group.episodes}) < len(tokens):
            return "no answer is preferred"
        return None

    def too_long(self, group: Group) -> str | None:
        """Return the reason to drop a row that is longer than ``max_tokens``."""
        longest = max(len(trajectory.tokens) for trajectory in group.trajectories)
        return f"longer than {self.max_tokens} tokens" if self.max_tokens and longest > self.max_tokens else None


class SupervisedRows(FileRows):
    """Conversations whose replies are trained on."""

    kind = Conversation


class ScoredRows(FileRows):
    """Conversations with a number ``score`` of the last reply, on which a reward model is trained."""

    kind = Scored
    train_on: TrainOn = "last_assistant"


class LabelledRows(FileRows):
    """Conversations with a ``label``: true where the last reply is good, false where it is bad."""

    kind = Labelled
    train_on: TrainOn = "last_assistant"


class PreferenceRows(FileRows):
    """Rows of ``chosen`` and ``rejected`` (each a text or a list of messages) and their ``prompt``; without one, the
    messages both begin with are the prompt."""

    kind: ClassVar[type[Example]] = Preference
    train_on: TrainOn = "last_assistant"


class PromptRows(FileRows):
    """Prompts for a policy to answer. All columns are kept, and a row must have each that ``columns`` names."""

    kind: ClassVar[type[Example]] = Prompt
    needs: tuple[str, ...] = ()
    """Columns without which a row is wrong, such as the columns that the reward function reads."""

    def row(self, where: str, values: JsonObject, as_texts: bool = False) -> Example:
        row = super().row(where, values, as_texts)
        for name in (*self.columns, *self.needs):
            if name not in values:
                raise DataError(f"{where}: {missing(name, values, self.columns)}")
        return row

    def group(self, row: Example, renderer: Renderer) -> Group:
        assert isinstance(row, Prompt)
        try:
            span = Span(renderer.render_prompt(row.question, row.declared), trained=False)
        except DataError as error:
            raise DataError(f"{row.where}: field 'prompt': {error}") from error
        return Group(
            row.where, Task(row.where, row.question), [Episode([Trajectory([span], row.question)], reward=0.0)]
        )

    def unusable(self, group: Group) -> str | None:
        return self.too_long(group)


def check_rows(rows: Iterable[Example], renderer: Renderer) -> None:
    """Raise ``DataError`` naming the first row with an image, if the renderer takes none; if it takes them, warn where
    no row has one."""
    for row in rows:
        if image_urls(row.question) or any(image_urls(answer.messages) for answer in row.answers):
            if renderer.images is None:
                raise DataError(f"{row.where}: the row has an image; set model.vision, with a model that reads images")
            return
    if renderer.images is not None:
        log.warning(
            "no row has an image, although model.vision is set; if another column than images or image holds them, "
            "name it: data.columns={images: COLUMN}"
        )


def judged(group: Group, renderer: Renderer) -> Group:
    """Return the group for a reward model: each conversation as the chat template renders it, and one more token, the
    only trained one. The model doesn't read that token: its prediction is made at the conversation's last token, where
    the score is read."""
    episodes = []
    for episode in group.episodes:
        tokens = renderer.render_whole(episode.messages, episode.branches[0].tools)
        spans = [Span(tokens, trained=False), Span(tokens[-1:], trained=True)]
        episodes.append(replace(episode, branches=[Trajectory(spans, episode.messages, episode.branches[0].tools)]))
    return replace(group, episodes=episodes)


def render_conversation(row: Example, answer: Answer, renderer: Renderer, train_on: TrainOn) -> Trajectory:
    """Return the trajectory of an answer, with the spans that a rollout would append. Raises ``DataError`` naming the
    row if the chat template can't render it, or omits tools, their calls or their results."""
    where = f"{row.where}: field {answer.field!r}"
    try:
        spans = _spans(answer.messages, row.tools, renderer, train_on)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if lost := renderer.left_out(answer.messages, row.tools):
        raise DataError(f"{where}: the chat template leaves out {lost}; give one that supports it")
    return Trajectory(spans, messages=answer.messages, tools=row.tools)


def _spans(
    messages: list[Message], tools: list[dict[str, object]] | None, renderer: Renderer, train_on: TrainOn
) -> list[Span]:
    messages = match_results(messages)
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


def question_key(row: Example) -> int:
    """Return a hash of a row's prompt, for the split."""
    asked = [[message["role"], " ".join(composed(words_of(message["content"])).split())] for message in row.question]
    return derive_seed("held out", json.dumps(asked), *map(fingerprint, image_urls(row.question)))
