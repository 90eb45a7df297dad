"""Distillation on the student's own answers (arXiv 2306.13649; Lu, "On-Policy Distillation", 2025): the student
samples, the teacher judges every token. By its loss it learns the teacher's distribution at each place, over its
likeliest tokens (``distillation``), or its opinion of the token that was sampled (``on_policy_distillation``); with
``advantage: teacher`` that opinion is an advantage for the loss ``policy``."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.advantages import GDPO, GroupAdvantage
from whet.algorithms.grpo import GRPO
from whet.algorithms.teachers import Taught
from whet.config import Component
from whet.losses.registry import LOSSES
from whet.metrics import Metrics

if TYPE_CHECKING:
    from whet.batch import Batch


class OnPolicyDistillation(Taught, GRPO):
    """The rewards of the task are reported; they train only where the advantage uses them."""

    group_size: int = Field(1, gt=0)
    """Answers per task; one is enough, because no group is compared."""
    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] | None = None
    """``teacher``, for losses that need one."""
    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="distillation")
    """``distillation``, ``on_policy_distillation``, or ``policy`` with an advantage."""

    @model_validator(mode="after")
    def _compares_answers(self) -> "OnPolicyDistillation":
        of_reward = getattr(self.advantage, "reward", None)
        compares = isinstance(of_reward, GroupAdvantage | GDPO) or getattr(of_reward, "group_baseline", False)
        if self.group_size == 1 and compares:
            raise ValueError(
                "advantage.reward compares the answers to a task, and with group_size = 1 it is always 0; set "
                "group_size to 2 or more, or leave advantage.reward out"
            )
        return self

    @property
    def fills(self) -> frozenset[str]:
        return super().fills | {"teacher_token_logprobs"}

    def report(self, batch: "Batch") -> Metrics:
        from whet.losses.weighted import token_metrics

        if self.advantage is None or not {"teacher_token_logprobs", "old_logprobs"} <= batch.filled:
            return Metrics()
        gap = batch.column("old_logprobs") - batch.column("teacher_token_logprobs")
        return token_metrics(batch, {"distillation/reverse_kl": gap})
