"""A whole run as one typed value. Each setting has its default in exactly one place: the config class that reads it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from whet.algorithms.base import Algorithm, OnlineAlgorithm
from whet.algorithms.registry import ALGORITHMS
from whet.base.errors import ConfigError
from whet.chat.template_file import ChatTemplate
from whet.checkpoint.config import CheckpointConfig
from whet.cluster.config import CLUSTERS, ClusterConfig, DevicesConfig
from whet.config import Component, Config, SettingsError
from whet.config.base import within
from whet.config.component import cannot_be_found
from whet.data.base import ROWS, Data
from whet.data.rows import Rows
from whet.endpoint.config import EndpointConfig
from whet.engines.config import GENERATORS, GONE, GeneratorConfig
from whet.learner.config import LearnerConfig, ProfileConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.losses.composite import PolicyLoss
from whet.losses.off_policy import TIS
from whet.metrics.sinks import SinkConfig
from whet.metrics.sinks.base import SINKS
from whet.metrics.sinks.jsonl import JSONLSink
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.rollouts.blend import Blend, Name
from whet.rollouts.config import RolloutConfig
from whet.rollouts.rewards import REWARDS, Reward
from whet.rollouts.sampling import Sampling
from whet.run.evaluation import EvaluationConfig
from whet.run.other_names import here
from whet.run.policies import PolicyConfig
from whet.run.recipe_checks import check_parts, kind_name
from whet.run.unread import idle, unread_by_rows
from whet.sandbox.sandbox import UNPROTECTED, is_unprotected
from whet.tasks.base import TASK_SETS, TaskSet
from whet.tasks.validate import ValidationConfig
from whet.weights.config import WeightSyncConfig


class Recipe(Config):
    """All settings of a run."""

    alternatives = frozenset({"steps", "epochs"})

    description: str = ""
    """One line for ``whet recipes``."""
    seed: int = Field(0, ge=0)
    """All random choices of the run are derived from it."""
    steps: int = Field(0, ge=0)
    """Steps of the loop; each takes ``algorithm.epochs`` times ``algorithm.minibatches`` optimizer steps. Give this
    or ``epochs``."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the rows or tasks of ``data``, instead of ``steps``; rows that are left out for their length count.
    The number of steps is rounded up."""
    model: ModelConfig = ModelConfig()
    """The weights to start from."""
    algorithm: Annotated[Algorithm, Component(ALGORITHMS)]
    """The method that turns rollouts or rows into gradients."""
    data: Annotated[Data, Component(TASK_SETS | ROWS)]
    """Tasks that are answered, or rows that are learned from: a built-in name or the dotted path of a class."""
    chat_template: ChatTemplate | None = None
    """Replaces the model's own chat template: its text or a file (``.jinja``); ``plain`` is a built-in one for models
    that have none."""
    template_arguments: dict[str, JsonValue] = Field(default={})
    """Variables of the chat template, as in ``{enable_thinking: false}``."""
    tools_as_text: bool = False
    """For a chat template that doesn't know tools: they stand in the system message, calls and results in the text."""
    sampling: Sampling = Sampling()
    """Sampling of the policy in training."""
    rewards: Annotated[Reward, Component(REWARDS)] = Field(default="score")  # type: ignore[assignment]
    """The reward of an episode, composed of its grade and other properties; by default its grade."""
    rollouts: RolloutConfig = RolloutConfig()
    """The number of rollouts in a step, and how far they may run ahead."""
    endpoint: EndpointConfig = EndpointConfig()
    """The address of the policy for programs that call it themselves (``data.type=agent``)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    cluster: Annotated[ClusterConfig, Component(CLUSTERS)] = Field(default="local")  # type: ignore[assignment]
    """The processes and machines of the learners' workers."""
    devices: DevicesConfig = DevicesConfig()
    """The shares of learners and generator in this machine's cores and GPUs: in turns, or divided."""
    parallel: ParallelConfig = ParallelConfig()
    """The ranks over which each learner is spread, by kind of parallelism."""
    generator: Annotated[GeneratorConfig, Component(GENERATORS, GONE)] = Field(default="torch")  # type: ignore[assignment]
    """The engine that samples."""
    policies: dict[Name, PolicyConfig] = Field(default={})
    """Further policies that learn in this run, by name, for episodes of several roles."""
    weights: WeightSyncConfig = WeightSyncConfig()
    """The transfer of new weights to the generator, and the proof of their arrival."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch.profiler records."""
    validation: ValidationConfig = ValidationConfig()
    """The checks of graders before a run trains on their rewards."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    sinks: tuple[Annotated[SinkConfig, Component(SINKS)], ...] = Field(default=("console", "jsonl"))  # type: ignore[arg-type]
    """The outputs of metrics. ``jsonl`` is always among them: reports, ``whet resume`` and Python read its file."""

    @field_validator("sinks")
    @classmethod
    def _with_jsonl(cls, sinks: tuple[SinkConfig, ...]) -> tuple[SinkConfig, ...]:
        kinds = [type(sink) for sink in sinks]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise ValueError(f"{Component(SINKS).name_of(twice)} is named twice; name each sink once")
        return sinks if JSONLSink in kinds else (*sinks, JSONLSink())

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_parts(self)
        return self

    def with_steps(self, groups_per_epoch: int) -> Self:
        """Return the recipe with ``steps`` computed from ``epochs``, if that is given."""
        if self.epochs is None:
            return self
        groups = self.data.groups_per_step or self.rollouts.prompts_per_step
        return self.model_copy(update={"steps": math.ceil(self.epochs * groups_per_epoch / groups)})

    def evaluated_with(self, changes: Mapping[str, object]) -> Self:
        """Return the recipe with changed settings of its evaluations on tasks. Raises ``ConfigError`` for settings that
        no recipe may have, or that contradict each other."""
        try:
            evaluation = self.evaluation.overridden(changes)
        except SettingsError as error:
            raise SettingsError([replace(issue, where="evaluation") for issue in error.issues]) from None
        if problems := "\n".join(evaluation.problems(self.sampling)):
            raise ConfigError(problems)
        return self.model_copy(update={"evaluation": evaluation})

    @property
    def duration(self) -> str:
        """The length of the run as the recipe gives it: in steps or in epochs."""
        unit, count = ("steps", self.steps) if self.epochs is None else ("epochs", self.epochs)
        return f"{count:g} {unit if count != 1 else unit[:-1]}"

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens that are learned from at once: an episode, or a row; None: not limited."""
        return self.data.longest if isinstance(self.data, Rows) else self.sampling.longest

    def of_policy(self, name: str) -> Self:
        """Return the recipe of a run whose only policy is the further policy ``name``."""
        return self.model_copy(update={**self.policies[name].replaces(), "policies": {}})

    @property
    def taskset(self) -> TaskSet:
        """``data`` as tasks. Raises ``ConfigError`` where it holds rows."""
        if not isinstance(self.data, TaskSet):
            raise ConfigError(f"this recipe learns from {kind_name(type(self.data))}, and here a task set is needed")
        return self.data

    @property
    def online(self) -> OnlineAlgorithm:
        """``algorithm`` as one whose policy answers tasks. Raises ``ConfigError`` where it learns from rows."""
        if not isinstance(self.algorithm, OnlineAlgorithm):
            raise ConfigError(f"this recipe learns from {kind_name(type(self.data))}, and here answers are sampled")
        return self.algorithm

    @property
    def rows(self) -> Rows:
        """``data`` as rows. Raises ``ConfigError`` where it is a task set."""
        if not isinstance(self.data, Rows):
            raise ConfigError(
                f"this recipe answers the tasks of {kind_name(type(self.data))}, and here rows are needed"
            )
        return self.data

    @classmethod
    def other_name(cls, key: str) -> str | None:
        return here(key)

    def unused(self) -> dict[str, str]:
        conditions = dict(idle(self))
        for name, policy in self.policies.items():
            given = policy.replaces()
            for key, when in idle(self.of_policy(name)):
                if key.partition(".")[0] in given:
                    conditions[f"policies.{name}.{key}"] = when
        alone = {key: f"it is read only where {when}; leave it out" for key, when in conditions.items()}
        why = "no part of the run reads it: this run learns from rows and samples nothing; leave it out"
        return alone | dict.fromkeys(unread_by_rows(self), why)

    @property
    def _stale(self) -> bool:
        """Return whether a step may learn from answers of older weights."""
        return isinstance(self.algorithm, OnlineAlgorithm) and self.rollouts.max_staleness > 0

    @property
    def in_turns(self) -> bool:
        """Return whether learner and generator are in one process and never compute at the same time."""
        if not isinstance(self.algorithm, OnlineAlgorithm) or self.rollouts.replay is not None or self._stale:
            return False
        return all(each.in_process for each in self.generators) and not self.cluster.has_processes

    @property
    def shares_nodes(self) -> bool:
        """Return whether engines on the nodes of a cluster have the devices of the learner's ranks, in turns."""
        return self.generator.on_cluster and self.devices.placement == "colocated"

    @property
    def generators(self) -> tuple[GeneratorConfig, ...]:
        """The engines of all policies, the main one's first."""
        further = (policy.generator or self.generator for policy in self.policies.values())
        return self.generator, *further

    @property
    def _corrects(self) -> str | None:
        """Return the setting because of which answers come from another distribution than the learner's, if any."""
        if self._stale:
            return "rollouts.max_staleness"
        generators = {"generator": self.generator} if isinstance(self.algorithm, OnlineAlgorithm) else {}
        for name, policy in self.policies.items():
            if policy.generator is not None:
                generators[f"policies.{name}.generator"] = policy.generator
        narrow = (f"{key}.{each}" for key, g in generators.items() if (each := g.low_precision_setting) is not None)
        return next(narrow, None)

    def with_implied(self, written: Callable[[str], bool]) -> tuple[Self, dict[str, str]]:
        """Correct for rollouts of stale or quantized weights by truncated importance sampling, unless a correction, or
        ``null``, is written."""
        main = self.algorithm.main
        key = f"algorithm.{main.key}.correction"
        cause = self._corrects
        if cause is None or not isinstance(main.loss, PolicyLoss) or main.loss.correction or written(key):
            return self, {}
        if not main.loss.surrogate.takes_correction:
            return self, {}
        loss = main.loss.model_copy(update={"correction": TIS()})
        algorithm = self.algorithm.model_copy(update={main.key: loss})
        return self.model_copy(update={"algorithm": algorithm}), {key: cause}

    def warnings(self) -> list[str]:
        """Return warnings about settings that are allowed but rarely intended."""
        texts = []
        main = self.algorithm.losses[self.algorithm.main_role]
        stale = self._stale
        if stale and isinstance(main, PolicyLoss) and main.correction is None and main.surrogate.takes_correction:
            texts.append(
                f"rollouts.max_staleness = {self.rollouts.max_staleness} without algorithm.loss.correction: stale "
                "rollouts bias the gradient; set e.g. algorithm.loss.correction=tis"
            )
        if (stale or not self.algorithm.on_policy) and "teacher_token_logprobs" in main.reads:
            texts.append(
                "algorithm.loss=on_policy_distillation has no ratio exp(lp - lp_old), so algorithm.epochs or "
                "minibatches > 1 and rollouts.max_staleness > 0 bias the gradient; set algorithm.advantage=teacher and "
                "algorithm.loss=policy instead"
            )
        if cannot_be_found(type(self.data)):
            texts.append(
                f"data is {type(self.data).__name__}, which is defined in a notebook or inside a function, where `whet "
                "eval`, `whet resume` and other processes can't find it; put the class into a file and import it"
            )
        texts += self.data.warnings()
        if is_unprotected(self.model_dump(mode="json")):
            texts.append(UNPROTECTED)
        if self.sampling.temperature == 0:
            texts.append("sampling.temperature = 0: every answer of a group is the same, so nothing can be learned")
        for where, taskset, sampling in self._tasksets():
            if sampling.max_turns == 1 and any(isinstance(t, TaskSet) and t.calls_tools for t in within(taskset)):
                texts.append(
                    f"sampling.max_turns = 1, and {where} has tools: an episode ends with its first call, whose result "
                    "is never read; set sampling.max_turns to the calls of a task and its answer, such as 4"
                )
        return texts

    def _tasksets(self) -> Iterator[tuple[str, Config, Sampling]]:
        """Yield the key of each task set that is played, the task set and its sampling."""
        if isinstance(self.data, Blend):
            for name, part in self.data.of.items():
                yield f"data.of.{name}", part.taskset, part.sampling.under(self.sampling)
        elif isinstance(self.data, TaskSet):
            yield "data", self.data, self.sampling
