"""An estimate of the time of a run on this machine's processor: the operations that its steps and evaluations need,
divided by the measured rates of matrix products of the model's shapes, which ``whet doctor`` prints.

The rest of the work (norms, softmax, choosing tokens, copies) is in the shares of these rates that were reached in real
runs. Loading, grading, saving and publishing are not counted.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from whet.algorithms.base import OnlineAlgorithm
from whet.core.batch import Batch
from whet.core.packing import pack
from whet.diagnose.work import Measured, Samples, Work
from whet.learner.model import build_whole
from whet.models.flops import ModelFlops
from whet.models.loading import load_model_config
from whet.models.rates import Multiplies, Shapes, measure
from whet.run.policies import models_of, share_of

if TYPE_CHECKING:
    from whet.algorithms.base import Role
    from whet.run.recipe import Recipe

# Shares of the measured rates that were reached, and seconds of an optimizer step for each trained number; the runs
# are in docs/planning.md. Tasks of an evaluation mostly have one answer, so their products are narrower.
_LEARNING, _SAMPLING, _EVALUATING = 0.65, 0.4, 0.3
_OPTIMIZER = 3e-9


@dataclass(slots=True)
class Duration:
    """Estimated seconds."""

    learning: float  # of a step, log-probs and optimizer included
    sampling: float  # of a step; 0 where nothing is sampled
    evaluations: dict[str, float]  # of one evaluation, by the name of the set; empty for the run's own rows or tasks
    total: float  # of the run, without loading, grading, saving and publishing
    threads: int
    gflops: tuple[float, float]  # measured, of one thread in the learner's precision: linear layers, batched products


def estimate(recipe: "Recipe", work: Work, samples: Samples) -> Duration | None:
    """Estimate the seconds of a recipe whose precisions are decided. None where it computes elsewhere than on this
    machine's processor in one process, because no rates were measured there."""
    plays = isinstance(recipe.algorithm, OnlineAlgorithm)
    in_process = not plays or all(generator.in_process for generator in recipe.generators)
    if torch.cuda.is_available() or recipe.parallel.ranks > 1 or not in_process:
        return None
    policies = [_Policy(recipe, samples, share_of(recipe, ""))]
    policies += [_Policy(of_policy, samples, share_of(recipe, name)) for name, of_policy in models_of(recipe)]
    main = policies[0].main
    learning, sampling = sum(each.learning for each in policies), sum(each.sampling for each in policies)
    evaluations = {}
    for name, measured in samples.evaluations.items():
        evaluating = [policies[0]] if name else policies  # in turn, where test episodes have no roles
        evaluations[name] = sum(each.evaluate(measured) for each in evaluating)
    return Duration(
        learning=learning,
        sampling=sampling,
        evaluations=evaluations,
        total=work.steps * (learning + sampling) + work.evaluations * sum(evaluations.values()),
        threads=torch.get_num_threads(),
        gflops=main.rates.of(main.learns_in),
    )


class _Policy:
    """The seconds that one policy takes for a step, of whose tokens it samples and learns a ``share``."""

    def __init__(self, recipe: "Recipe", samples: Samples, share: float) -> None:
        algorithm = recipe.algorithm
        self._plays = isinstance(algorithm, OnlineAlgorithm)
        models = {name: _Model(recipe, role) for name, role in algorithm.roles.items()}
        self.main = models[algorithm.main_role]
        steps = samples.groups / (recipe.data.groups_per_step or recipe.rollouts.prompts_per_step) / share
        learned = sum(model.learn(batch) for model in models.values() for batch in samples.steps) / steps
        updates = algorithm.epochs * algorithm.minibatches
        self.learning = learned + updates * sum(model.optimizer_step for model in models.values())
        self.sampling = sum(map(self.main.sample, samples.steps)) / steps / _SAMPLING if self._plays else 0.0

    def evaluate(self, measured: Measured) -> float:
        """Return the seconds of one evaluation."""
        passes = map(self.main.sample if self._plays else self.main.score, measured.batches)
        share = _EVALUATING if self._plays else 1.0
        return sum(passes) / share * measured.number / max(1, measured.counted)


class _Model:
    """The seconds that the model of one role takes."""

    def __init__(self, recipe: "Recipe", role: "Role") -> None:
        self._recipe, self._role = recipe, role
        model, trains, value = role.model_config(recipe.model), role.loss is not None, role.head == "value"
        self.rates = measure(Shapes.of(load_model_config(model)))
        self.learns_in: Multiplies = "bfloat16" if recipe.learner.computes_in == "bfloat16" else "float32"
        built = build_whole(model, "float32", trains, value, 0, torch.device("meta"))
        self._flops = ModelFlops.of(built.model, value)
        trained = sum(parameter.numel() for _, parameter in built.by_name() if parameter.requires_grad)
        self.optimizer_step = _OPTIMIZER * trained if trains else 0.0
        outputs = {role.fills[column] for column in recipe.algorithm.reads if column in role.fills}
        passes = ("reference_logprobs" in outputs) + bool(outputs - {"reference_logprobs"})
        self._passes = max(passes, not trains)  # forward passes that score the batch of a step

    def learn(self, batch: Batch) -> float:
        """Return the seconds of all passes over the batch of a step."""
        learner = self._recipe.learner
        unit = "token" if self._role.loss is None else self._role.loss.unit
        micro_batches = pack(batch, 1, learner.max_tokens, unit, learner.pack_tokens)[0]
        return sum(self._learn(micro.batch) for micro in micro_batches)

    def _learn(self, batch: Batch) -> float:
        forward = self._seconds(batch, self.learns_in, _LEARNING)
        if self._role.loss is None:
            return self._passes * forward
        again = forward if self._recipe.learner.activation_checkpointing else 0.0
        trained = self._seconds(batch, self.learns_in, _LEARNING, backward=True) + again
        return self._passes * forward + self._recipe.algorithm.epochs * trained

    def score(self, batch: Batch) -> float:
        """Return the seconds of an evaluation on rows."""
        return (1 + self._passes) * self._seconds(batch, self.learns_in, _LEARNING)

    def sample(self, batch: Batch) -> float:
        """Return the seconds in which an engine at the measured rates would sample the trained tokens of a batch."""
        bfloat16 = self._recipe.generator.dtype == "bfloat16"
        return self._seconds(batch, "bfloat16" if bfloat16 else "float32", 1.0)

    def _seconds(self, batch: Batch, precision: Multiplies, share: float, *, backward: bool = False) -> float:
        predicted = int(batch.trained.sum())
        whole = self._flops.needed(batch.position, predicted, backward)
        linear = replace(self._flops, pair={}).needed(batch.position, predicted, backward)
        rates = self.rates.of(precision)
        return (linear / rates[0] + (whole - linear) / rates[1]) / 1e9 / torch.get_num_threads() / share
