"""Distillation: the student is trained towards a teacher, a model that is not trained.

On given replies (``distillation``; arXiv 1503.02531, 2306.13649) or on replies sampled from the student
(``on_policy_distillation``; arXiv 2306.13649; Lu, "On-Policy Distillation", 2025). Depending on its loss, the student
learns the teacher's distribution at each position, over the teacher's most likely tokens, or the teacher's log-prob of
the token at that position. With ``advantage: teacher`` this log-prob is an advantage for policy losses, which allows
several epochs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from whet.algorithms.advantage import Advantage, Credit
from whet.algorithms.base import POLICY, Algorithm, OnlineAlgorithm, Role
from whet.algorithms.registry import AnyAdvantage, AnyLoss
from whet.base.errors import ConfigError, DataError, GeneratorError, WhetError
from whet.core.batch import Batch
from whet.core.types import Group
from whet.data.base import Data
from whet.data.rows import SupervisedRows
from whet.distillation.teacher import COLUMNS, Teacher
from whet.losses.distillation import DistillationLoss
from whet.losses.weighted import at_trained, token_metrics
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.processes.compute import compute

if TYPE_CHECKING:
    from whet.distillation.ask import LoadedTeacher
    from whet.learner.base import Scorer

log = logging.getLogger(__name__)


class TeacherAdvantage(Advantage):
    """A = weight x (lp_teacher - lp_old) + the advantage of the task's reward, if one is set (Lu, "On-Policy
    Distillation", 2025). Each token is rated by itself, without the tokens after it."""

    weight: float = Field(1.0, gt=0)
    """Weight of the teacher's part."""
    clamp: float = Field(10.0, gt=0)
    """Upper bound of |lp_teacher - lp_old|."""
    reward: AnyAdvantage | None = None
    """The advantage of the task's rewards, which is added; None: the rewards don't count."""

    @property
    def reads(self) -> frozenset[str]:
        columns = frozenset({"teacher_token_logprobs", "old_logprobs"})
        return columns if self.reward is None else columns | self.reward.reads

    @property
    def fills(self) -> frozenset[str]:
        return super().fills if self.reward is None else self.reward.fills

    @property
    def compares(self) -> bool:
        return self.reward is not None and self.reward.compares

    def estimate(self, batch: Batch) -> Credit:
        """Return the sum of both parts, and the returns of ``reward``. Raises DataError as ``reward`` does."""
        teacher_N = at_trained(batch, batch.column("teacher_token_logprobs")).double()
        gap_N = teacher_N - at_trained(batch, batch.column("old_logprobs"))
        advantages_N = self.weight * gap_N.clamp(-self.clamp, self.clamp)
        if self.reward is None:
            return Credit(advantages_N)
        of_reward = self.reward.estimate(batch)
        return Credit(advantages_N + of_reward.per_token(batch), of_reward.returns)


class TeacherAlgorithm(Algorithm):
    """Base of the algorithms with teachers."""

    teachers: dict[str, Teacher] = Field(min_length=1)
    """Teachers by name. Several are mixed by weight, unless ``route_by`` is set."""
    k: int | None = Field(None, gt=0)
    """Number of most likely tokens that a teacher gives at each position, for losses that use them. None: 64."""
    route_by: str | None = None
    """The field of a task or row that names its teacher."""
    loss: AnyLoss = DistillationLoss()
    """``distillation``, over the teacher's most likely tokens, or ``on_policy_distillation``."""

    @model_validator(mode="after")
    def _reads_k(self) -> Self:
        if self.k is not None and "topk_ids" not in self.reads:
            raise ValueError(
                "k is set, but the loss uses the teacher's log-prob of the given token, not its most likely tokens; "
                "leave k out, or choose loss=distillation"
            )
        return self

    @model_validator(mode="after")
    def _mixes_local_models(self) -> Self:
        served = self.served
        if served and len(self.teachers) > 1 and self.route_by is None and "topk_ids" in self.reads:
            raise ValueError(
                f"teachers.{served[0]}.server: a mixture asks each teacher for the log-probs of the tokens that the "
                "others name, which servers can't give; set route_by, load the teacher without server, or choose a "
                "loss of the given token (loss=on_policy_distillation)"
            )
        return self

    @property
    def served(self) -> tuple[str, ...]:
        """The names of the teachers that are behind servers."""
        return tuple(name for name, teacher in self.teachers.items() if teacher.server is not None)

    @property
    def roles(self) -> dict[str, Role]:
        loaded = {name: teacher for name, teacher in self.teachers.items() if name not in self.served}
        frozen = {f"teacher/{name}": Role(model=teacher) for name, teacher in loaded.items()}
        return {"policy": Role(loss=self.loss, fills=POLICY), **frozen}

    @property
    def fills(self) -> frozenset[str]:
        return COLUMNS

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        """Also fill the columns of the teachers that loss and advantage read."""
        from whet.distillation.ask import ask
        from whet.learner.base import Top

        if columns := (self.reads & COLUMNS) - batch.filled:
            async with self._loaded(learners) as loaded:
                vocabularies = [scorer.facts.vocabulary for scorer in learners.values()]
                rows = min(*vocabularies, *(teacher.learner.facts.vocabulary for teacher in loaded.values()))
                of_groups = [tuple(loaded[name] for name in self._teachers_of(group)) for group in groups]
                top = Top(self._most_likely(rows), below=rows)
                await ask(batch, groups, of_groups, learners["policy"], columns, top)
        return await super().prepare(batch, groups, learners)

    @asynccontextmanager
    async def _loaded(self, learners: Mapping[str, Scorer]) -> AsyncIterator[dict[str, LoadedTeacher]]:
        """Open the teachers by name, those behind servers with a connection."""
        from whet.distillation.ask import LoadedTeacher
        from whet.distillation.server import ServerTeacher

        async with AsyncExitStack() as stack:
            loaded = {}
            for name, settings in self.teachers.items():
                if settings.server is None:
                    scorer = learners[f"teacher/{name}"]
                else:
                    scorer = await stack.enter_async_context(ServerTeacher.open(name, settings, settings.server))
                loaded[name] = LoadedTeacher(name, settings, scorer)
            yield loaded

    def _most_likely(self, rows: int) -> int:
        """Return how many tokens a teacher with a vocabulary of that size gives."""
        return min(self.k or 64, rows)

    def _teachers_of(self, group: Group) -> Sequence[str]:
        if self.route_by is None:
            return tuple(self.teachers)
        name = group.task.columns.get(self.route_by)
        if not isinstance(name, str) or name not in self.teachers:
            raise DataError(
                f"task {group.task.uid!r}: its field {self.route_by!r} (algorithm.route_by) must name a teacher, "
                f"not {name!r}; teachers: {', '.join(self.teachers)}"
            )
        return (name,)

    def check_models(self, model: ModelConfig) -> None:
        """Raise ``ConfigError`` for a teacher that does not exist, or whose tokenizer differs from the student's
        although the loss uses the teacher's most likely tokens."""
        from whet.distillation.vocabulary import renderer_of, same_tokens

        for name, teacher in self.teachers.items():
            try:
                same = same_tokens(model, teacher)
                if not same:
                    renderer_of(teacher, teacher.chat_template)
            except WhetError as error:
                hint = (
                    "; this is a run folder, so export its model first"
                    if (Path(teacher.path) / "recipe.yaml").exists()
                    else ""
                )
                raise ConfigError(f"algorithm.teachers.{name}: {error}{hint}") from error
            mismatch = f"teacher {name!r} ({teacher.path}) has other tokens than the student ({model.path})"
            if not same and "topk_ids" in self.reads:
                raise ConfigError(
                    f"{mismatch}, so the student can't use its most likely tokens. Use the log-probs of whole spans of "
                    "text (algorithm on_policy_distillation with loss=on_policy_distillation, or with "
                    "advantage=teacher and loss=policy), or choose a teacher of the same family"
                )
            if not same:
                log.warning("%s: they are compared on spans of text whose boundaries both tokenizers share", mismatch)

    async def check_servers(self, model: ModelConfig, longest: int | None) -> None:
        from whet.distillation.server import ServerTeacher
        from whet.distillation.vocabulary import rows_of

        rows = min(rows_of(part) for part in (model, *self.teachers.values()))
        k = self._most_likely(rows) if "topk_ids" in self.reads else 0
        for name, settings in self.teachers.items():
            if settings.server is not None:
                try:
                    async with ServerTeacher.open(name, settings, settings.server) as teacher:
                        await teacher.check(k, rows, longest)
                except GeneratorError as error:
                    raise ConfigError(f"algorithm.teachers.{name}.server: {error}; start the server first") from None


class Distillation(TeacherAlgorithm):
    """Distillation on rows of text; nothing is sampled."""

    takes: ClassVar[tuple[type[Data], ...]] = (SupervisedRows,)


class OnPolicyDistillation(TeacherAlgorithm, OnlineAlgorithm):
    """Distillation on answers sampled from the student. The task's rewards are reported; they train only if the
    advantage uses them."""

    group_size: int = Field(1, gt=0)
    """Answers per task; one is enough, because no group is compared."""
    advantage: AnyAdvantage | None = None
    """``teacher``, for losses that read advantages (``policy``)."""

    @property
    def estimator(self) -> Advantage | None:
        return self.advantage

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        metrics = await super().prepare(batch, groups, learners)
        if self.advantage is None or not {"teacher_token_logprobs", "old_logprobs"} <= batch.filled:
            return metrics
        gap = batch.column("old_logprobs") - batch.column("teacher_token_logprobs")
        return metrics.merge(await compute(token_metrics, batch, {"distillation/reverse_kl": gap}))
