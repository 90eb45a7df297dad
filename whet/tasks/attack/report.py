"""The result of an attack: its findings, and what was tried."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from whet.core.types import Task
from whet.tasks.cases import Case


@dataclass(frozen=True, slots=True)
class Finding:
    """A cheap answer that earns a reward, or an answer on which the grader fails."""

    kind: str  # "answer", "mean", "raises" or "hangs"
    family: str
    name: str
    task: Task
    answer: str
    reward: float | None  # None after a failure
    limit: float  # the least reward, or mean reward, that counts
    mean: float  # mean reward of the idea over ``tasks`` tasks
    tasks: int
    error: str = ""

    @property
    def case(self) -> Case:
        """Return the answer as a case, which should earn nothing."""
        return Case(f"{self.family}: {self.name}", self.task, self.answer, 0.0, "adversarial")


@dataclass(slots=True)
class Report:
    """The result of an attack."""

    tasks: int
    gradings: int = 0
    bound: float = 0.0  # mean rewards that are more than two standard errors above this are findings
    tried: dict[str, int] = field(default_factory=dict)  # family -> answers
    findings: list[Finding] = field(default_factory=list)
    not_attacked: list[str] = field(default_factory=list)


def counted(findings: Sequence[Finding]) -> dict[str, int]:
    """Return the number of findings of each family."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.family] = counts.get(finding.family, 0) + 1
    return counts
