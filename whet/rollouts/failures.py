"""Episodes that fail: which of them trying again can't mend, and how often a user is told.

A mistake in the code of an environment fails every episode in the same way. So each kind of failure (an exception and
the line of the user's code that it came from) is shown once; the rest is counted and stands in the log.
"""

import logging
from collections import Counter

from whet.base.errors import WhetError
from whet.core.types import Group, Status
from whet.processes.user_code import own_frames, own_lines
from whet.rollouts.config import RolloutConfig
from whet.tools.toolbox import is_infrastructure

log = logging.getLogger(__name__)

_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
    RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def is_mistake(error: BaseException) -> bool:
    """Return whether code is wrong, so that the same answer would fail again. A library's own exception (an answer of a
    server that is not JSON, say) and what a lost connection caused are failures of infrastructure."""
    return type(error).__module__ == "builtins" and isinstance(error, _MISTAKES) and not is_infrastructure(error)


class Failures:
    """The failed attempts at the episodes of one run or evaluation."""

    def __init__(self) -> None:
        self.completed = 0
        """Episodes that came to their end."""
        self.counts = Counter[str]()
        """Attempts, by the exception and the line that it came from."""
        self._mistakes = dict[str, str]()  # the lines of each kind that was a mistake

    def tell(self, session: str, attempt: int, error: Exception, why: str) -> None:
        """Count a failed attempt, and warn of the first one of its kind."""
        frames = [] if isinstance(error, TimeoutError) else own_frames(error)[-1:]
        kind = ":".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)])
        self.counts[kind] += 1
        text = f"episode {session} failed (attempt {attempt}): {why}"
        if self.counts[kind] > 1:
            log.info("%s", text)
            return
        if is_mistake(error):
            self._mistakes[kind] = own_lines(error)
            text += f"\n{self._mistakes[kind]}"
        log.warning("%s\nFurther failures of this kind are counted, and stand in log.txt only.", text)

    @property
    def only_mistake(self) -> str | None:
        """The lines of the one mistake that every episode so far has failed with; None where some did not."""
        if self.completed or len(self.counts) != 1:
            return None
        return next(iter(self._mistakes.values()), None)

    def check(self) -> None:
        """Raise ``WhetError`` where every episode so far has failed with one and the same mistake."""
        if lines := self.only_mistake:
            raise WhetError(
                f"every episode so far ({self.counts.total()}) failed with the same error, which trying again can't "
                f"mend:\n{lines}"
            )

    def check_lost(self, group: Group, failed: int, config: RolloutConfig) -> None:
        """Say that a group was dropped. Raise ``WhetError`` where ``failed`` groups of the step are too many."""
        errors = [episode.error for episode in group.episodes if episode.status is Status.FAILED]
        log.warning("group %s is dropped: %d of its episodes failed", group.uid, len(errors))
        self.check()
        most = config.max_failed * config.prompts_per_step
        if failed > (max(1.0, most) if most else 0):
            raise WhetError(
                f"{failed} groups of this step were lost to failures, more than rollouts.max_failed = "
                f"{config.max_failed:g} of {config.prompts_per_step}; the last one, {group.uid}: {errors[-1]}"
            )
