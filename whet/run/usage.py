"""The use of devices by a run: the learners' operations per second, device-hours, cost."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from whet.learner.base import Learner, LearnerFacts
from whet.metrics.sinks.jsonl import FILE, check_metrics, read_lines
from whet.models.flops import peak_tflops
from whet.run.machine import read

if TYPE_CHECKING:
    from pathlib import Path

    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Usage:
    """The devices of a run, and what it has used so far. A device is a GPU; without GPUs it is the machine."""

    devices: int
    learning: int  # the devices that learners compute on
    peak: float | None  # TFLOP/s of one of them, in the learner's precision
    cost: float | None  # of a device for an hour
    hours: float = 0.0  # of all devices
    flops: float = 0.0  # of the learners, so far

    @classmethod
    def of(cls, recipe: "Recipe", folder: "Path", learners: Mapping[str, Learner]) -> "Usage":
        """Look up the devices of a run. What a resumed run used before is read from its metrics."""
        facts = learners[recipe.algorithm.main_role].facts
        learning, devices = _devices(recipe, facts, len(learners))
        seen = torch.cuda.device_count()
        if facts.hardware and seen > devices and not recipe.cluster.joined:
            text = "this run uses %d of the %d GPUs here. To learn on several: cluster=processes parallel.fsdp=%d"
            log.warning(text, devices, seen, seen)
        last = [line.get("time/device_hours") or 0.0 for _, _, line in read_lines(folder / FILE, check_metrics)]
        return cls(devices, learning, _peak(folder, facts), recipe.devices.cost_per_hour, max(last, default=0.0))

    def step(self, lap: Mapping[str, float], flops: float, rate: float) -> dict[str, float]:
        """Return the measures of a step: ``lap`` are its seconds by phase, ``flops`` the operations of the learners
        since the run began, ``rate`` the tokens per second."""
        seconds = lap.get("time/learn", 0.0) + lap.get("time/score", 0.0)
        values = {
            "time/tokens_per_second_per_device": rate / self.devices,
            "time/score_share": lap.get("time/score", 0.0) / lap["time/step"],
        }
        done, self.flops = flops - self.flops, flops
        if done > 0 and seconds > 0:
            values["time/learner/flops"] = done
            values["time/learner/tflops"] = done / seconds / self.learning / 1e12
            if self.peak:
                values["time/learner/mfu"] = values["time/learner/tflops"] / self.peak
        return values

    def spend(self, seconds: float) -> dict[str, float]:
        """Count the time of a whole step. Return what the run has used so far."""
        self.hours += self.devices * seconds / 3600
        return {"time/device_hours": self.hours} | ({} if self.cost is None else {"time/cost": self.hours * self.cost})


def _devices(recipe: "Recipe", facts: LearnerFacts, roles: int) -> tuple[int, int]:
    """Return the number of devices of the learners, and of the whole run."""
    generator = recipe.generator
    apart = len(generator.gpus) or (generator.replicas * generator.ranks if generator.on_cluster else 0)
    if recipe.devices.placement == "colocated":
        apart = 0
    if not facts.hardware:
        return 1, 1 + (len(generator.gpus) if apart else 0)
    learning = facts.ranks * (roles if recipe.cluster.separates_models else 1)
    return learning, learning + apart


def _peak(folder: "Path", facts: LearnerFacts) -> float | None:
    """Return the TFLOP/s of a learner's device: of a GPU by its name; of this machine's cores, if its products were
    measured when the run began and one process learns."""
    if facts.hardware:
        return peak_tflops(facts.hardware, facts.precision)
    decision = read(folder)
    if decision is None or decision.rates is None or facts.ranks > 1:
        return None
    rate = decision.rates.get(f"linear_{facts.precision}")
    return None if rate is None else rate * facts.threads / 1e3
