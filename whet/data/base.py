"""The base of a recipe's section ``data``: a task set, whose tasks the policy answers, or rows to learn from."""

from whet.config import Config


class Data(Config):
    """Base of ``TaskSet`` and ``Rows``. An algorithm names those that it can learn from."""

    @property
    def groups_per_step(self) -> int | None:
        """Groups that one step learns from; None where ``rollouts.prompts_per_step`` decides."""
        return None

    def warnings(self) -> list[str]:
        """Return what is allowed but rarely meant, for people to see when a run begins. By default nothing."""
        return []
