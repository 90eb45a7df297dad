"""The settings that the machine decides: the precisions in which learner and generator compute. They are decided once,
in the process of the run and before its parts are built, and a resumed run keeps them. On another machine, the last
digits of the results may differ.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from whet.algorithms.base import OnlineAlgorithm
from whet.base.errors import ConfigError
from whet.base.files import write_atomically
from whet.config.typed import check_types
from whet.models.device import unused_gpus
from whet.models.loading import load_model_config
from whet.models.precision import Choice, Instructions, choose_precision

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
FILE = "machine.json"  # in the run folder


@dataclass(frozen=True, slots=True)
class Decision:
    """The precisions of a run, and the reasons for them."""

    learner: str
    generator: str | None  # None where nothing is sampled
    why: str
    rates: dict[str, float] | None  # GFLOP/s, see ``Rates``; None: not measured
    instructions: dict[str, str | int | bool]  # see ``Instructions``

    def __str__(self) -> str:
        alike = self.generator in (None, self.learner)
        what = self.learner if alike else f"learner {self.learner}, generator {self.generator}"
        return f"{what} ({self.why})"


def decide(recipe: "Recipe", *, starts: bool = True) -> tuple["Recipe", Decision]:
    """Return the recipe with ``auto`` replaced. Warns if the recipe asks for a precision that the machine emulates.
    Unless a run ``starts``, no cluster is asked for the GPUs of its nodes: the GPUs of this machine count."""
    model, samples = load_model_config(recipe.model), isinstance(recipe.algorithm, OnlineAlgorithm)
    learner, generator = recipe.learner, recipe.generator
    devices = _devices(recipe, starts)
    if starts and recipe.learner.device == "auto" and devices[0] == "cpu" and (why := unused_gpus()) is not None:
        text = "this machine has NVIDIA GPUs, but the run learns on the CPU: %s. If that is meant: learner.device=cpu"
        log.warning(text, why)
    requested: dict[str, tuple[str, Device]] = {"learner.precision": (learner.precision, devices[0])}
    if samples:
        requested["generator.dtype"] = (generator.dtype, devices[1])
    choices: dict[Device, Choice] = {}
    for precision, device in requested.values():
        if precision in ("auto", "bfloat16") and device not in choices:
            choices[device] = choose_precision(model, device)
    if learner.precision == "auto":
        fastest = learner.fastest(choices[devices[0]].precision, devices[0])
        learner = learner.model_copy(update={"precision": fastest})
    policies = dict(recipe.policies)
    if samples:
        generator = generator.resolve_auto(model, devices[1])
        for name, policy in policies.items():
            if policy.generator is not None:
                resolved = policy.generator.resolve_auto(load_model_config(policy.model or recipe.model), devices[1])
                policies[name] = policy.model_copy(update={"generator": resolved})
    if problem := next(learner.problems(recipe.parallel, recipe.model.lora is not None), None):
        raise ConfigError(f"{problem}; learner.precision = auto is {learner.precision} on this machine")
    slow = [
        key for key, (precision, device) in requested.items() if precision == "bfloat16" and choices[device].emulates
    ]
    if slow:
        text = "%s = bfloat16, which this machine emulates: %s. Set %s, which is float32 here"
        why = choices[requested[slow[0]][1]].why
        log.warning(text, " and ".join(slow), why, " ".join(f"{key}=auto" for key in slow))
    auto = [device for precision, device in requested.values() if precision == "auto"]
    decision = Decision(
        learner=learner.computes_in,
        generator=generator.dtype if samples else None,
        why=choices[auto[0]].why if auto else "as the recipe says",
        rates=next((asdict(choice.rates) for choice in choices.values() if choice.rates), None),
        instructions=asdict(Instructions.here()),
    )
    return recipe.model_copy(update={"learner": learner, "generator": generator, "policies": policies}), decision


def decide_run(recipe: "Recipe", folder: Path, resuming: bool) -> "Recipe":
    """Decide for the run in ``folder``, which keeps the decision. Warns if a resumed run can't continue with the same
    bits."""
    settled, decision = decide(recipe)
    before = read(folder) if resuming else None
    if before is not None and (before.learner, before.generator) == (decision.learner, decision.generator):
        if changed := _changed(before.instructions, decision.instructions):
            log.warning(
                "this run began on another machine (%s): results from here on agree with that machine up to rounding, "
                "and are not the same bits that it would have computed",
                changed,
            )
        decision = before
    else:
        if before is not None:
            log.warning("this run began in %s, and continues in %s", before, decision)
        write_atomically(folder / FILE, json.dumps(asdict(decision), indent=1))
    log.info("computes in %s", decision)
    return settled


def read(folder: Path) -> Decision | None:
    """Return the decision that a run has kept; None if there is none that can be read."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        check_types(Decision, values)
        return Decision(**values)
    except (OSError, ValueError, TypeError):
        return None


def _devices(recipe: "Recipe", starts: bool) -> tuple[Device, Device]:
    """Return the kinds of devices that learner and generator compute on."""
    if recipe.learner.device == "cuda":
        return "cuda", "cuda"
    generator, here, workers = recipe.generator, torch.cuda.is_available(), None
    if starts and (recipe.learner.device == "auto" or generator.on_cluster):
        workers = recipe.cluster.on_gpus()
    there = here if workers is None else workers
    learns = recipe.learner.device == "auto" and there
    samples = there if generator.on_cluster else bool(generator.gpus) or here
    return "cuda" if learns else "cpu", "cuda" if samples else "cpu"


def _changed(before: dict[str, str | int | bool], now: dict[str, str | int | bool]) -> str:
    """Return the differing facts, each with the value before and now."""
    return ", ".join(
        f"{name.replace('_', ' ')} {before[name]}, here {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    )
