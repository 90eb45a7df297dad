"""The further policies of a run: models that learn as the main one does, each from what its own roles did."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from whet.algorithms.base import OnlineAlgorithm
from whet.algorithms.distillation import TeacherAlgorithm
from whet.chat.template_file import ChatTemplate
from whet.config import Component, Config
from whet.config.issues import did_you_mean
from whet.engines.config import GENERATORS, GONE, GeneratorConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import ModelConfig
from whet.rollouts.filters import FILTERS, BestAndWorst, OverlongShaping
from whet.rollouts.rewards import Score
from whet.tasks.base import TaskSet
from whet.tasks.judges.config import own_judges

if TYPE_CHECKING:
    from whet.rollouts.session import Cast, Player
    from whet.run.recipe import Recipe


class PolicyConfig(Config):
    """A further policy, which plays some of the roles of the episodes and learns from them alone. A section that is not
    given is the recipe's; a given one replaces it whole."""

    plays: tuple[str, ...] = Field(min_length=1)
    """The roles that it plays. The main policy plays all other roles."""
    model: ModelConfig | None = None
    """The weights to start from."""
    chat_template: ChatTemplate | None = None
    """Replaces its model's own chat template. With the recipe's model, by default the recipe's."""
    optimizer: OptimizerConfig | None = None
    """The optimizer of its learner."""
    generator: Annotated[GeneratorConfig, Component(GENERATORS, GONE)] | None = None
    """The engine that samples its replies."""

    @field_validator("plays")
    @classmethod
    def _named_once(cls, plays: tuple[str, ...]) -> tuple[str, ...]:
        if "" in plays:
            raise ValueError("a role has a name; the main policy plays what has none")
        if twice := next((role for role in plays if plays.count(role) > 1), None):
            raise ValueError(f"the role {twice!r} is named twice")
        return plays

    def replaces(self) -> dict[str, object]:
        """Return the sections of the recipe that differ for this policy."""
        sections = {name: self.value_of(name) for name in ("model", "optimizer", "generator")}
        given = {name: section for name, section in sections.items() if section is not None}
        if self.model is not None or self.chat_template is not None:
            given["chat_template"] = self.chat_template
        return given


def everything(role: str) -> bool:
    """Return True: the only policy of a run plays each role."""
    return True


def plays(recipe: "Recipe", name: str) -> Callable[[str], bool]:
    """Return whether a policy plays a role; the main one has the name ``""``."""
    if name:
        return frozenset(recipe.policies[name].plays).__contains__
    taken = {role for further in recipe.policies.values() for role in further.plays}
    return (lambda role: role not in taken) if taken else everything


def cast_of(recipe: "Recipe", main: "Player", further: "Mapping[str, Player]") -> "Cast":
    """Return the player of each role that the task set names, given the players of all policies. With one policy there
    is nothing to tell apart."""
    if not further:
        return {}
    cast = dict.fromkeys(recipe.taskset.role_names, main)
    return cast | {role: further[name] for name, policy in recipe.policies.items() for role in policy.plays}


def share_of(recipe: "Recipe", name: str) -> float:
    """Return the share of the roles that a policy plays, as an estimate of its share of the tokens."""
    if not recipe.policies:
        return 1.0
    roles = recipe.taskset.role_names
    return sum(map(plays(recipe, name), roles)) / len(roles)


def in_words(recipe: "Recipe") -> str:
    """Return who plays which roles, for people."""
    main = [role for role in recipe.taskset.role_names if plays(recipe, "")(role)]
    further = [f"{name} plays {', '.join(config.plays)}" for name, config in recipe.policies.items()]
    return "; ".join([f"the main policy plays {', '.join(main)}", *further])


def problems_of_policies(recipe: "Recipe") -> Iterator[str]:
    """Yield each problem of the further policies with the rest of a recipe."""
    data, roles = recipe.data, set[str]()
    if not isinstance(recipe.algorithm, OnlineAlgorithm) or not isinstance(data, TaskSet):
        yield "policies play the roles of episodes, and this run learns from rows; leave it out"
        return
    names = tuple(data.role_names)
    if not names:
        yield (
            f"policies: the episodes of {type(data).__name__} have one role, or it doesn't name them; leave policies "
            "out, or choose a task set with several roles, such as data=nim. Your own task set names them: "
            'named_roles = ("proposer", "solver")'
        )
        return
    for name, further in recipe.policies.items():
        for role in further.plays:
            if role not in names:
                yield (
                    f"policies.{name}.plays: {type(data).__name__} has no role {role!r}, only {', '.join(names)}."
                    f"{did_you_mean(role, names)}"
                )
            elif role in roles:
                yield f"policies.{name}.plays: another policy plays the role {role!r}, too; name it once"
            roles.add(role)
    if roles >= set(names):
        yield (
            f"policies: no role is left for the main policy, which is the section model: {', '.join(names)} are all "
            "taken; leave one of the policies out"
        )
    if both := sorted(recipe.policies.keys() & recipe.evaluation.sets.keys()):
        yield f"evaluation.sets.{both[0]} has the name of a policy, whose evaluation is reported under it; rename one"
    yield from _shared(recipe)
    yield from _unsupported(recipe)


def _shared(recipe: "Recipe") -> Iterator[str]:
    """Yield each server and each GPU that the engines of two policies would share: a server has the weights of one, and
    an engine takes the memory that is free."""
    taken = dict.fromkeys([*recipe.generator.servers, *recipe.generator.gpus], "the main policy")
    for name, further in recipe.policies.items():
        engine = further.generator or recipe.generator
        for kind, setting, places in (("server", "urls", engine.servers), ("GPU", "devices", engine.gpus)):
            if place := next((place for place in places if place in taken), None):
                yield (
                    f"policies.{name}.generator: the engine of {taken[place]} has the {kind} {place}; give this policy "
                    f"its own generator with other {setting}"
                )
            taken |= dict.fromkeys(places, f"the policy {name}")


def _unsupported(recipe: "Recipe") -> Iterator[str]:
    """Yield each part of the recipe that is for runs with one policy."""
    filters = [*recipe.online.filters, *recipe.online.pairing]
    of_one_reward = [each for each in filters if isinstance(each, BestAndWorst | OverlongShaping)]
    if own_judges(recipe.data) or own_judges(recipe.evaluation.sets):
        yield "judge.model = policy: there are several policies; name another model as the judge, or leave policies out"
    if isinstance(recipe.algorithm, TeacherAlgorithm):
        yield "algorithm: teachers are for runs with one policy; choose another algorithm, or leave policies out"
    for name in (Component(FILTERS).name_of(type(each)) for each in of_one_reward):
        yield (
            f"algorithm.filters: {name} reads one reward of an episode, and roles have one each; leave it or policies "
            "out (algorithm=online_dpo needs it)"
        )
    if recipe.rewards != Score():
        yield "rewards: composed rewards read one reward of an episode, and roles have one each; leave one of them out"
    models = [recipe.model, *(further.model for further in recipe.policies.values() if further.model is not None)]
    for setting, is_set, instead in (
        ("model.vision", any(model.vision is not None for model in models), "leave it out"),
        ("rollouts.partial", recipe.rollouts.partial, "leave it out"),
        ("rollouts.replay", recipe.rollouts.replay is not None, "leave it out"),
    ):
        if is_set:
            yield f"{setting} is not supported together with policies: {instead}, or leave policies out"


def models_of(recipe: "Recipe") -> Iterator[tuple[str, "Recipe"]]:
    """Yield each further policy's name with the recipe of a run in which it is the only one."""
    for name in recipe.policies:
        yield name, recipe.of_policy(name)
