"""A warning about roles that earn rewards without replying, as one with a mistyped name does."""

import logging
from collections.abc import Iterable

from whet.config.issues import did_you_mean
from whet.core.types import Group

log = logging.getLogger(__name__)


class Unheard:
    """Warns once of each role that earned rewards in a step and did not reply in it."""

    def __init__(self) -> None:
        self._warned = set[str]()

    def check(self, step: int, groups: Iterable[Group]) -> None:
        """Check the groups of a step."""
        episodes = [episode for group in groups for episode in group.episodes]
        replied = {branch.role for episode in episodes for branch in episode.branches}
        earned = {role for episode in episodes for role in episode.rewards}
        for role in sorted(earned - replied - self._warned):
            self._warned.add(role)
            log.warning(
                "the role %r earned rewards in step %d and gave no reply, so nothing is learned from them.%s Roles "
                "that replied: %s", role, step, did_you_mean(role, replied), ", ".join(sorted(replied)),
            )  # fmt: skip
