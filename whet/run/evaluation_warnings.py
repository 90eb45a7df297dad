"""Warnings about evaluations whose accuracy says less than it seems to."""

import logging
from collections.abc import Iterable

from whet.core.types import Task
from whet.run.scores import Report

log = logging.getLogger(__name__)


class EvaluationWarnings:
    """Warns once of tasks that are trained on, and of rewards that are not an accuracy."""

    def __init__(self, trained: Iterable[Task], split: str) -> None:
        """``trained``: the training tasks, walked over at each check that needs them. ``split``: of the evaluation."""
        self._trained, self._split = trained, split
        self._not_trained = set[str]()  # evaluated tasks
        self._warned_of_trained = self._warned_of_accuracy = False

    def check(self, report: Report) -> None:
        """Check an evaluation."""
        both = [] if self._warned_of_trained else self._trained_on({task.uid for task, _ in report.episodes})
        if both:
            self._warned_of_trained = True
            log.warning(
                "%d of the %d tasks that are evaluated are trained on, such as %s, so their accuracy says little about "
                "other tasks: return others for the split test", len(both), report.n, both[0],
            )  # fmt: skip
        if report.by_sign and not self._warned_of_accuracy:
            self._warned_of_accuracy = True
            log.warning(
                "evaluation/accuracy is the share of rewards above 0, because answers have no score 'correct', and "
                "rewards other than 0 and 1: compare evaluation/reward, or return a score 'correct'"
            )

    def _trained_on(self, evaluated: set[str]) -> list[str]:
        """Return the evaluated tasks of the split ``test`` that are trained on. The training tasks are walked over,
        because they may be many more than can be held."""
        new = evaluated - self._not_trained if self._split == "test" else set[str]()
        both = [task.uid for task in self._trained if task.uid in new] if new else []
        self._not_trained |= new.difference(both)
        return list(dict.fromkeys(both))
