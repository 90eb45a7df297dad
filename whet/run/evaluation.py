"""The settings of evaluations."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import Field, model_validator

from whet.config import Component, Config
from whet.rollouts.blend import Name
from whet.rollouts.sampling import Sampling, Temperature
from whet.tasks.base import TASK_SETS, TaskSet

_SETTINGS_OF_SETS = ("samples", "temperature", "max_new_tokens")  # in which an additional set may differ


class HeldOut(Config):
    """The settings of every evaluation, on tasks or rows that the run doesn't train on."""

    enabled: bool = True
    """False: never."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    split: Literal["test", "train"] = "test"
    """The split of the tasks or rows."""
    limit: int | None = Field(None, gt=0)
    """At most this many, the first of the split."""
    patience: int = Field(0, ge=0)
    """End the run after this many evaluations in a row that are not better in ``checkpoints.best_metric``; each better
    one is saved. 0: never."""

    @model_validator(mode="after")
    def _has_evaluations(self) -> Self:
        if self.patience and not (self.enabled and self.every):
            raise ValueError("patience counts evaluations during the run: set evaluation.every")
        return self


class EvaluationSet(Config):
    """An additional set of tasks that every evaluation answers. ``samples``, ``temperature`` and
    ``max_new_tokens`` are by default those for the run's tasks."""

    data: Annotated[TaskSet, Component(TASK_SETS)]
    """The tasks; the run never trains on them."""
    split: Literal["test", "train"] = "test"
    """The split of its tasks."""
    limit: int | None = Field(None, gt=0)
    """At most this many, the first of the split."""
    samples: int | None = Field(None, gt=0, le=100_000)
    """Answers per task."""
    temperature: Temperature | None = None
    """0: greedy."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer."""


class EvaluationConfig(HeldOut):
    """The settings of evaluations on tasks. A run that learns from rows reads only the settings in ``HeldOut``."""

    samples: int = Field(1, gt=0, le=100_000)
    """Answers per task."""
    temperature: Temperature = 0.0
    """0: greedy."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer; by default as in training."""
    consensus: float = Field(0.5, gt=0, le=1)
    """Share of a task's answers that must agree for cons@k, with ``samples`` above 1."""
    concurrency: int = Field(256, gt=0, le=100_000)
    """Episodes that run at once."""
    retries: int = Field(2, ge=0)
    """Repetitions of an episode after its environment or generator failed."""
    deadline: float = Field(3600.0, gt=0)
    """Seconds that one evaluation may take, of each set."""
    sets: dict[Name, EvaluationSet] = Field(default={})
    """Additional sets by name; the name is part of their metrics."""

    def sampling(self, training: Sampling) -> Sampling:
        """Return the sampling of an evaluation: as in training, with this temperature and length, and no truncation."""
        changes: dict[str, Any] = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if self.max_new_tokens is not None:
            changes["max_new_tokens"] = self.max_new_tokens
        return training.model_copy(update=changes)

    @property
    def settings(self) -> "dict[str, Self]":
        """Return the settings for the run's tasks and for the tasks of each additional set, by key."""
        return {"evaluation": self} | {f"evaluation.sets.{name}": self.of_set(each) for name, each in self.sets.items()}

    def problems(self, training: Sampling) -> Iterator[str]:
        """Yield a problem for each set with several answers to a task that would be the same one. In episodes of
        several turns an environment may act differently each time."""
        for key, settings in self.settings.items():
            if settings.samples > 1 and settings.temperature == 0 and training.max_turns == 1:
                yield (
                    f"{key}.samples = {settings.samples} at temperature 0 gives {settings.samples} times the same "
                    f"answer; set {key}.temperature=1 (of `whet eval`: --temperature 1), or {key}.samples=1"
                )

    def of_set(self, additional: EvaluationSet) -> Self:
        """Return the settings of an additional set."""
        changes = {name: value for name in _SETTINGS_OF_SETS if (value := additional.value_of(name)) is not None}
        return self.model_copy(update=changes)

    def overridden(self, changes: Mapping[str, object]) -> Self:
        """Return the settings with changes, which hold for the additional sets too, but for the split. Raises
        ``SettingsError`` for changes that no recipe may have."""
        checked: dict[str, Any] = dict(changes)
        type(self)(**checked)  # a copy with changes is not checked
        of_sets = {name: value for name, value in changes.items() if name in ("limit", *_SETTINGS_OF_SETS)}
        sets = {name: each.model_copy(update=of_sets) for name, each in self.sets.items()}
        return self.model_copy(update={**changes, "sets": sets})


class Changes(TypedDict, total=False):
    """Settings of an evaluation, in place of the recipe's; None: as in the recipe."""

    split: str | None
    limit: int | None
    samples: int | None
    temperature: float | None
