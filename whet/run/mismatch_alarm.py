"""An alarm for log-probs of the generator that are not the learner's."""

import logging
from collections.abc import Iterable, Mapping

from whet.base.errors import WhetError
from whet.checkpoint.policy import FURTHER
from whet.losses.off_policy import MISMATCH
from whet.rollouts.config import RolloutConfig

log = logging.getLogger(__name__)


class MismatchAlarm:
    """Warns once for consecutive steps above ``rollouts.mismatch_alarm``. ``further``: the further policies' names."""

    def __init__(self, config: RolloutConfig, further: Iterable[str] = ()) -> None:
        self._config = config
        self._keys = [MISMATCH, *(f"{FURTHER}/{name}/{MISMATCH}" for name in further)]
        self._above = False  # in the last step

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the metrics of a step. Raises ``WhetError`` above ``rollouts.max_mismatch``."""
        error, key = max((values.get(key, 1.0), key) for key in self._keys)
        cause = "`whet doctor RECIPE` looks for the cause"
        if old := values.get("staleness/max", 0.0):
            cause = f"Some were sampled by weights {old:g} steps old, which explains a part of it; {cause} of the rest"
        message = (
            f"in step {step} {key} is {error:.4g}, above rollouts.{{}} = {{:g}}: the log-probs that the generator "
            f"gives its tokens are not the learner's. {cause}"
        )
        most, alarm = self._config.max_mismatch, self._config.mismatch_alarm
        if most is not None and error > most:
            raise WhetError(message.format("max_mismatch", most))
        above = error > alarm
        if above and not self._above:
            log.warning(message.format("mismatch_alarm", alarm))
        self._above = above
