"""The settings of a preparation: sources of rows, what is dropped, and the splits that are written."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from whet.chat.template_file import ChatTemplate
from whet.config import Component, Config
from whet.data.base import ROWS
from whet.data.row_kinds import Prompt
from whet.data.rows import FileRows
from whet.models.config import ModelConfig

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]

_OF_PROMPTS = {
    "prompts": "whet.data.rows:PromptRows",
    "nemotron3_nano_rl": "whet.prep.nemotron:NemotronBlend",
}  # rows that are prepared, and trained on as tasks


class Source(Config):
    """Rows of one origin."""

    rows: Annotated[FileRows, Component(ROWS | _OF_PROMPTS)]
    """Type, path and columns, as in ``data`` of a recipe, or ``prompts``: rows for GRPO and its relatives. Rows longer
    than ``max_tokens`` are dropped."""
    share: float = Field(1.0, gt=0, le=1000)
    """Copies of each row in the output; a fraction is a random choice, the same for the same seed."""
    where: dict[str, tuple[float, float]] = Field({})
    """Columns with the least and the greatest number that a kept row has, as in ``{pass_rate: [0.1, 0.9]}``."""
    keep_columns: tuple[str, ...] | None = None
    """Columns that training doesn't read (an id, a category) and the output has nevertheless. None: all; []: none."""
    limit: int | None = Field(None, gt=0)
    """Read at most this many rows, the first of the source."""
    licence: str = ""
    """Recorded in the manifest."""


class Thoughts(Config):
    """Changes of the thoughts of replies (``<think>``, or ``reasoning_content``); rows without any stay as they are."""

    removed: float = Field(0.0, ge=0, le=1)
    """Share of the rows that lose their thoughts."""
    cut: float = Field(0.0, ge=0, le=1)
    """Share of the rows whose longer thoughts end after a budget; the answer follows."""
    budgets: tuple[Annotated[int, Field(gt=0)], ...] = Field((512, 1024, 2048, 4096), min_length=1)
    """Tokens of a cut thought; one of them for each row."""


class Decontamination(Config):
    """Drops rows that share text with evaluation sets."""

    against: tuple[str, ...] = ()
    """Files of evaluation rows; all their texts count."""
    ngram: int = Field(13, ge=3)
    """Words in a row that two texts must share; shorter evaluation texts must be contained as a whole."""


class PrepConfig(Config):
    """A preparation: ``whet prep FILE`` reads it."""

    description: str = ""
    """One line about the result."""
    seed: int = Field(0, ge=0)
    """All random choices are derived from it."""
    model: ModelConfig | None = None
    """The model whose tokenizer and chat template rows must fit. None: rows are not rendered, and lengths not
    checked."""
    chat_template: ChatTemplate | None = None
    """Replaces the model's chat template, as in a recipe."""
    sources: dict[Name, Source] = Field(min_length=1)
    """The origins of the rows by name; each row of the output has the name in its field ``source``."""
    duplicates: Literal["drop", "drop_questions", "drop_near", "keep"] = "drop"
    """``drop``: equal rows, up to case and spacing. ``drop_questions``: rows with equal questions. ``drop_near``: rows
    whose sets of five-word sequences overlap by more than ``near`` (MinHash, needs ``whet[data]``)."""
    near: float = Field(0.8, gt=0, lt=1)
    """The Jaccard similarity above which ``drop_near`` drops a row."""
    decontamination: Decontamination = Decontamination()
    thoughts: Thoughts = Thoughts()
    validation: float = Field(0.02, ge=0, lt=1)
    """Share of the questions in the validation split, chosen by a hash of the question."""
    test: float = Field(0.0, ge=0, lt=1)
    """Share of the questions in the test split."""
    shard_rows: int = Field(100_000, gt=0)
    """Rows in one file of the output."""
    max_dropped: float = Field(0.1, ge=0, le=1)
    """Stop if more than this share of a source's rows is wrong or can't be rendered."""

    @model_validator(mode="after")
    def _fits_together(self) -> "PrepConfig":
        if self.validation + self.test >= 1:
            raise ValueError(f"validation = {self.validation} and test = {self.test} leave no row to train on")
        fields = {name: source.rows.kind.fields for name, source in self.sources.items()}
        if len(set(fields.values())) > 1:
            listed = "; ".join(f"{name}: {', '.join(each)}" for name, each in fields.items())
            raise ValueError(f"the sources have rows of several kinds, and one file holds one kind ({listed})")
        for name, source in self.sources.items():
            if type(source.rows).read is not FileRows.read:
                raise ValueError(f"sources.{name}.rows makes its rows and reads no file, so it can't be prepared")
        if (
            any(issubclass(source.rows.kind, Prompt) for source in self.sources.values())
            and self.thoughts.removed + self.thoughts.cut > 0
        ):
            raise ValueError("thoughts are removed from replies, and rows of prompts have none: leave thoughts out")
        if self.thoughts.removed + self.thoughts.cut > 1:
            raise ValueError("thoughts.removed and thoughts.cut are shares of the rows, and together more than 1")
        if self.model is None and self.thoughts.cut:
            raise ValueError("thoughts.budgets are in tokens: set model, whose tokenizer counts them")
        for name, source in self.sources.items():
            idle = [] if source.rows._preset else [*source.rows.changed(("test_path", "test_size", "batch_size"))]
            if idle:
                raise ValueError(
                    f"sources.{name}.rows.{idle[0]} is not read: whet prep divides the rows of `path` by "
                    "`validation` and `test`; prepare a file of test rows by itself, or name it where you train"
                )
            for column, (least, greatest) in source.where.items():
                if least > greatest:
                    raise ValueError(f"sources.{name}.where.{column}: {least:g} is more than {greatest:g}")
        if self.model is None and (limited := [name for name, s in self.sources.items() if s.rows.max_tokens]):
            raise ValueError(f"sources.{limited[0]}.rows.max_tokens needs a tokenizer: set model")
        return self
