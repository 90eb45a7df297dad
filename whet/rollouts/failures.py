"""Failed episodes: which failures a retry can't fix, and how often each is shown to the user.

A mistake in an environment's code fails every episode in the same way. So each kind of failure (an exception and the
line of the user's code that raised it) is shown once; later ones are counted and written to the log file.
"""

import logging
from collections import Counter

from whet.base.errors import WhetError
from whet.core.types import Group, Status
from whet.processes.user_code import user_frames, user_lines
from whet.rollouts.config import RolloutConfig
from whet.tools.toolbox import is_infrastructure

log = logging.getLogger(__name__)

_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
    RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def is_mistake(error: BaseException) -> bool:
    """Return whether the error is a bug in code, so that the same answer would fail again. A library's own exception
    (for a server's answer that is not JSON, say) and errors caused by a lost connection are infrastructure failures."""
    return type(error).__module__ == "builtins" and isinstance(error, _MISTAKES) and not is_infrastructure(error)


class Failures:
    """The failed attempts at the episodes of one run or evaluation."""

    def __init__(self, *, one_ends_all: bool = False) -> None:
        """``one_ends_all``: the error that follows the first failed episode says why, so attempts are only logged."""
        self._one_ends_all = one_ends_all
        self.completed = 0
        """Episodes that ended normally."""
        self.counts = Counter[str]()
        """Failed attempts, by exception and the line that raised it."""
        self._mistakes = dict[str, str]()  # kind -> source lines, for failures that are mistakes

    def report(self, session: str, attempt: int, error: Exception, reason: str) -> None:
        """Count a failed attempt, and warn if it is the first of its kind and no error will say why."""
        frames = [] if isinstance(error, TimeoutError) else user_frames(error)[-1:]
        kind = ":".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)])
        self.counts[kind] += 1
        text = f"episode {session} failed (attempt {attempt}): {reason}"
        if is_mistake(error) and kind not in self._mistakes:
            self._mistakes[kind] = user_lines(error)
            text += f"\n{self._mistakes[kind]}"
        if self.counts[kind] > 1 or self._one_ends_all:
            log.info("%s", text)
            return
        log.warning("%s\nFurther failures of this kind are counted, but only written to log.txt.", text)

    @property
    def only_mistake(self) -> str | None:
        """The lines of the one mistake with which every episode so far has failed; None if there is no such mistake."""
        if self.completed or len(self.counts) != 1:
            return None
        return next(iter(self._mistakes.values()), None)

    def check(self) -> None:
        """Raise ``WhetError`` if every episode so far has failed with the same mistake."""
        if lines := self.only_mistake:
            raise WhetError(
                f"every episode so far ({self.counts.total()}) failed with the same error, which a retry can't "
                f"fix:\n{lines}"
            )

    def check_lost(self, group: Group, failed: int, config: RolloutConfig) -> None:
        """Log that a group was dropped. Raise ``WhetError`` if ``failed``, the number of such groups in this step, is
        too large."""
        errors = [episode.error for episode in group.episodes if episode.status is Status.FAILED]
        log.warning("group %s is dropped: %d of its episodes failed", group.uid, len(errors))
        self.check()
        most = config.max_failed * config.prompts_per_step
        if failed > (max(1.0, most) if most else 0):
            raise WhetError(
                f"{failed} groups of this step were lost to failures, more than rollouts.max_failed = "
                f"{config.max_failed:g} of {config.prompts_per_step}; the last one, {group.uid}: {errors[-1]}"
            )
