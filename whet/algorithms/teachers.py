"""Teachers: models that are not trained and say what the student should have said. What the algorithms that learn from
them have in common: which models, who judges what, and whether they understand each other."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from whet.algorithms.base import Algorithm
from whet.errors import ConfigError, DataError, WhetError
from whet.models.config import ModelConfig
from whet.types import Group

if TYPE_CHECKING:
    from whet.batch import Batch
    from whet.learner.base import Scorer

log = logging.getLogger(__name__)

COLUMNS = frozenset({"topk_ids", "teacher_logprobs", "teacher_token_logprobs"})


class Teacher(ModelConfig):
    """A model that is asked and never trained: a folder, such as the export of another run, or a Hub id."""

    path: str
    lora: None = None
    weight: float = Field(1.0, gt=0)
    """Its share where several teachers judge together."""
    chat_template: str | None = None
    """Replaces its own chat template, where it has another tokenizer than the student."""


class Taught(Algorithm):
    """Base of the algorithms that learn from teachers."""

    teachers: dict[str, Teacher] = Field(min_length=1)
    """By name. Several are mixed by weight, unless ``route_by`` is set."""
    k: int = Field(64, gt=0)
    """How many of its likeliest tokens a teacher names at each place, for losses over those."""
    route_by: str | None = None
    """The field of a task or row that names its teacher."""

    @model_validator(mode="after")
    def _is_taught(self) -> "Taught":
        if not self.needs & COLUMNS:
            raise ValueError("neither loss nor advantage asks the teachers; choose others, or another algorithm")
        read = frozenset[str]().union(*(loss.reads for loss in self.losses.values()))
        if self.estimator is not None and "advantages" not in read:
            raise ValueError("the loss reads no advantage; choose loss=policy, or leave the advantage out")
        return self

    @property
    def frozen(self) -> dict[str, ModelConfig]:
        return {_role(name): teacher for name, teacher in self.teachers.items()}

    @property
    def fills(self) -> frozenset[str]:
        return super().fills | {"topk_ids", "teacher_logprobs"}

    def check_models(self, model: ModelConfig) -> None:
        """Raises ``ConfigError`` for a teacher that is not there, or whose tokens are others than the student's where
        its likeliest tokens are learned from."""
        from whet.algorithms.vocabulary import renderer_of, same_tokens

        for name, teacher in self.teachers.items():
            try:
                same = same_tokens(model, teacher)
                if not same:
                    renderer_of(teacher, teacher.chat_template)
            except WhetError as error:
                hint = "; it is a run: export it first" if (Path(teacher.path) / "recipe.yaml").exists() else ""
                raise ConfigError(f"algorithm.teachers.{name}: {error}{hint}") from error
            others = f"teacher {name!r} ({teacher.path}) has other tokens than the student ({model.path})"
            if not same and "topk_ids" in self.needs:
                raise ConfigError(
                    f"{others}, so its likeliest tokens mean nothing to it. Learn from the log-probs of "
                    "whole spans of text (algorithm on_policy_distillation with loss=on_policy_distillation, or with "
                    "advantage=teacher and loss=policy), or choose a teacher of the same family"
                )
            if not same:
                log.warning("%s: they are compared by the spans of text that both can write", others)

    async def consult(self, batch: "Batch", groups: Sequence[Group], learners: "Mapping[str, Scorer]") -> None:
        """Each teacher is asked about the groups that it judges."""
        from whet.algorithms.opinions import Judge, ask
        from whet.algorithms.vocabulary import same_tokens
        from whet.learner.base import Top

        student, columns = learners["policy"], self.needs & COLUMNS - batch.filled
        if not columns:
            return
        strange = any(not same_tokens(student.facts.model, teacher) for teacher in self.teachers.values())
        if strange and batch.old_logprobs is None:
            batch.old_logprobs = (await student.score(batch, {"logprobs"}))["logprobs"]
        rows = min(learner.facts.vocabulary for learner in learners.values())
        judges = {name: Judge(name, one, learners[_role(name)]) for name, one in self.teachers.items()}
        panels = [tuple(judges[name] for name in self._judges_of(group)) for group in groups]
        said = await ask(batch, groups, panels, student, columns, Top(min(self.k, rows), below=rows))
        for name, column in said.items():
            batch.fill(name, column)

    def _judges_of(self, group: Group) -> Sequence[str]:
        if self.route_by is None:
            return tuple(self.teachers)
        name = group.task.data.get(self.route_by)
        if not isinstance(name, str) or name not in self.teachers:
            raise DataError(
                f"task {group.task.uid!r}: its field {self.route_by!r} (algorithm.route_by) must name a teacher, "
                f"not {name!r}; known: {', '.join(self.teachers)}"
            )
        return (name,)


def _role(name: str) -> str:
    return f"teacher/{name}"
