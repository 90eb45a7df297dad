"""The commonest way to learn nothing: all answers to a task earn the same, so that none is better than another."""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

_STEPS = 3  # in a row, before anything is said

_WHERE = (
    "Read some answers (`whet view RUN`) and let the grader grade known ones (`whet validate RECIPE`): does it find "
    "the answer where the model writes it? If it does, the tasks are too {}"
)


class NoSignal:
    """Warns once in each row of steps in which every group's rewards were equal."""

    def __init__(self) -> None:
        self._steps = 0

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Look at the metrics of a step in which answers to one task are compared with each other."""
        equal = values.get("reward/std") == 0
        self._steps = self._steps + 1 if equal else 0
        if self._steps != _STEPS:
            return
        lowest, highest = values.get("reward/min", 0.0), values.get("reward/max", 0.0)
        since = f"in the {_STEPS} steps up to step {step}"
        if lowest == highest == 0:
            log.warning(
                "all rewards are 0 %s: nothing can be learned, for no answer is better than another. %s; choose easier "
                "ones, show worked examples in the prompt, or allow longer answers (sampling.max_new_tokens)",
                since, _WHERE.format("hard for this model"),
            )  # fmt: skip
        else:
            log.warning(
                "all answers to a task got the same reward %s (from %.3g to %.3g over the tasks of the last one): "
                "nothing can be learned, for no answer is better than another. %s; choose others, a larger "
                "algorithm.group_size, or a higher sampling.temperature if the answers are all alike",
                since, lowest, highest, _WHERE.format("easy or too hard for this model"),
            )  # fmt: skip
