"""The staleness budget. A group of rollouts may start only while it holds a permit; a step's permits come back after
new weights are published. With ``max_staleness`` n, n + 1 steps' worth of permits exist, so no rollout that reaches the
learner was started more than n versions ago."""

from whet.base.errors import WhetError


class Permits:
    """Counts permits. One task (the source) takes and returns them, so there is nothing to wait for here.

    >>> permits = Permits(per_step=2, max_staleness=0)
    >>> permits.take(), permits.take(), permits.take()
    (True, True, False)
    >>> permits.give_back(2); permits.take()
    True
    """

    def __init__(self, per_step: int, max_staleness: int) -> None:
        self.per_step, self.max_staleness = per_step, max_staleness
        self.available = per_step * (max_staleness + 1)
        self._total = self.available

    def take(self) -> bool:
        """Take one, if there is one."""
        if self.available <= 0:
            return False
        self.available -= 1
        return True

    def hold(self, count: int) -> None:
        """As many are out already: what a resumed run had under way, which may be more than it may have now."""
        self.available -= count

    def give_back(self, count: int = 1) -> None:
        """Groups that were dropped before training free their permits at once."""
        self.available += count
        if self.available > self._total:
            raise WhetError("more permits were given back than taken: a step was published twice")

    def in_time(self, begun: int, version: int, after: int) -> bool:
        """Whether a group that was begun under version ``begun`` is within the bound if ``after`` others come
        between it and the step that follows on ``version`` (less than 0: it is part of that step).

        >>> permits = Permits(per_step=2, max_staleness=1)
        >>> permits.in_time(3, version=4, after=-1), permits.in_time(3, version=4, after=0)
        (True, False)
        """
        return version + after // self.per_step + 1 - begun <= self.max_staleness
