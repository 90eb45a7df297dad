"""Grading in worker processes: an answer that breaks its grader earns 0, and a score names the reason."""

from collections.abc import Callable

from whet.processes.pool import CallCrash, CallTimeout, Pool
from whet.tasks.scores import FORMAT, NamedScore, NamedScores

POOLED: NamedScores = FORMAT | {"grading_timeout": NamedScore(), "grading_crash": NamedScore()}
"""Scores of a grade by ``GradingPool``: 1 if its worker took too long, and 1 if it died."""


class GradingPool(Pool):
    """Worker processes that grade."""

    async def scores(self, function: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
        """Return the scores that ``function`` returns. An answer on which the worker hangs or dies has a reward of 0
        and the reason, ``grading_timeout`` or ``grading_crash``, as a score of 1."""
        try:
            scores: dict[str, float] = await self.call(function, *args)
        except (CallTimeout, CallCrash) as failure:
            reason = "grading_timeout" if isinstance(failure, CallTimeout) else "grading_crash"
            return {"reward": 0.0, "correct": 0.0, "format": 1.0, reason: 1.0}
        return scores
