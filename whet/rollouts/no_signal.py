"""A warning about the most common reason that nothing is learned: all answers to a task get the same reward."""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

_STEPS = 3  # consecutive steps before the warning

_WHERE = (
    "Read some answers (`whet view RUN`) and check the grader (`whet validate RECIPE`): does it miss the answer "
    "where the model writes it? Do the weights of several rewards cancel each other (scores/... in metrics.jsonl)? If "
    "neither, the tasks are too {}"
)


class NoSignal:
    """Warns once per series of consecutive steps in which every group's rewards were equal."""

    def __init__(self) -> None:
        self._steps = 0

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the metrics of a step of an algorithm that compares the answers to a task."""
        equal = values.get("reward/std") == 0
        self._steps = self._steps + 1 if equal else 0
        if self._steps != _STEPS:
            return
        lowest, highest = values.get("reward/min", 0.0), values.get("reward/max", 0.0)
        since = f"in the {_STEPS} steps up to step {step}"
        if lowest == highest == 0:
            log.warning(
                "all rewards are 0 %s: nothing can be learned, because no answer is better than another. %s; choose "
                "easier tasks, show worked examples in the prompt, or allow longer answers (sampling.max_new_tokens)",
                since, _WHERE.format("hard for this model"),
            )  # fmt: skip
        else:
            log.warning(
                "all answers to a task got the same reward %s (from %.3g to %.3g over the tasks of the last "
                "step): nothing can be learned, because no answer is better than another. %s; choose other tasks, a "
                "larger algorithm.group_size, or a higher sampling.temperature if the answers are all alike",
                since, lowest, highest, _WHERE.format("easy or too hard for this model"),
            )  # fmt: skip
