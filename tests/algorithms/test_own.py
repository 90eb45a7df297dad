"""Losses, algorithms and presets from outside the package."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.e2e.test_learning import lines
from tests.losses.batches import random_groups
from tests.toy import toy_recipe
from whet.algorithms.advantage import Advantage, Credit
from whet.algorithms.grpo import GRPO, GroupAdvantage
from whet.base.errors import ConfigError, DataError
from whet.config import dump_yaml, load
from whet.core.batch import Batch, ModelOutput
from whet.losses.composite import PolicyLoss
from whet.losses.policy_gradient import PPOClip
from whet.metrics import Metrics
from whet.run import run
from whet.run.recipe import Recipe

OWN = "tests.algorithms.own"


def test_a_loss_of_ones_own_reads_a_column_that_an_algorithm_of_ones_own_fills(
    tiny_model: Path, tmp_path: Path
) -> None:
    algorithm = {"type": f"{OWN}:Surprise", "minibatches": 1}
    changes: dict[str, Any] = {"learner": {"max_tokens": 140}, "evaluation": {"enabled": False}}
    folder = run.start(toy_recipe(tiny_model, steps=2, algorithm=algorithm, **changes), tmp_path / "run")
    for line in lines(folder, "train")[1:]:
        assert line["learner/micro_batches"] > 1, "cut up, and the column with it"
        assert line["surprise/mean"] > 0
        assert line["gradient_norm"] > 0


def test_its_column_must_be_read_and_its_loss_needs_the_column(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"own:Surprise fills surprise, which .* reads; leave it out"):
        toy_recipe(tiny_model, algorithm={"type": f"{OWN}:Surprise", "loss": "sft"})
    with pytest.raises(ConfigError, match=r"loss = tests.algorithms.own:Surprising reads surprise, which .* fills"):
        toy_recipe(tiny_model, algorithm={"type": "grpo", "loss": f"{OWN}:Surprising"})


def test_an_algorithm_whose_prepare_returns_no_metrics_is_named(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, steps=1, algorithm=f"{OWN}:Forgetful", evaluation={"enabled": False})
    with pytest.raises(DataError, match=r"Forgetful\.prepare \(.*own.py:\d+\) must return Metrics, .*, not a NoneType"):
        run.start(recipe, tmp_path / "run")


def test_roles_and_fills_of_an_algorithm_have_their_types() -> None:
    class Method(GRPO):
        def roles(self) -> Any:  # type: ignore[override]
            return {}

    class Lists(GRPO):
        @property
        def fills(self) -> Any:
            return ["surprise"]

    with pytest.raises(
        ConfigError, match=r"algorithm = .*Method: `roles` must be a dict of roles by name; write @prop"
    ):
        Method()
    with pytest.raises(ConfigError, match=r"algorithm = .*Lists has `fills` = \['surprise'\], which must be a set"):
        Lists()


@pytest.mark.parametrize("names", [["advantages"], "advantages"])
def test_columns_that_are_no_set_of_names_are_refused(names: Any) -> None:
    class Lists(PolicyLoss):
        @property
        def reads(self) -> Any:
            return names

    class ListsToo(GroupAdvantage):
        @property
        def fills(self) -> Any:
            return names

    with pytest.raises(ConfigError, match=r"loss = .*Lists has `reads` = .*advantages.*, which must be a set of names"):
        GRPO(loss=Lists())
    with pytest.raises(ConfigError, match=r"advantage = .*ListsToo has `fills` = .*, which must be a set of names"):
        GRPO(advantage=ListsToo())


def test_a_unit_that_does_not_exist_is_refused() -> None:
    class Rows(PolicyLoss):
        unit: ClassVar[Any] = "row"

    with pytest.raises(
        ConfigError, match=r"loss = .*Rows has `unit` = 'row', which must be one of 'token', 'sequence'"
    ):
        GRPO(loss=Rows())


@pytest.mark.parametrize("name", ["reward/mean", "gradient_norm"])
def test_a_loss_that_records_a_metric_of_the_run_is_an_error(tiny_model: Path, tmp_path: Path, name: str) -> None:
    class Recorded(PolicyLoss):
        def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
            values, metrics = super().per_token(output, batch)
            return values, metrics.mean(name, 500.0)

    recipe = toy_recipe(tiny_model, steps=1, evaluation={"enabled": False})
    recipe = recipe.model_copy(update={"algorithm": GRPO(group_size=2, loss=Recorded())})
    with pytest.raises(DataError, match=rf"the metric '{name}' is whet's own, .*: choose another name"):
        run.start(recipe, tmp_path / "run")


def test_a_preset_of_ones_own_is_named_and_changed_as_a_built_in_one_is(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"type": f"{OWN}:SMALL_GROUPS", "epochs": 2, "loss": {"surrogate": {"clip_high": 0.3}}}
    made = toy_recipe(tiny_model, algorithm=algorithm)
    assert isinstance(made.algorithm, GRPO)
    assert made.algorithm.advantage == GroupAdvantage(divide_by_std=False)
    assert (made.algorithm.epochs, made.algorithm.minibatches) == (2, 3)
    assert made.algorithm.loss.surrogate == PPOClip(clip_high=0.3)  # type: ignore[attr-defined]
    (tmp_path / "recipe.yaml").write_text(dump_yaml(made))
    again = load(Recipe, tmp_path).value
    assert again.algorithm == made.algorithm
    assert f"type: {OWN}:SMALL_GROUPS" in dump_yaml(again), "the name stays"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda batch: None, r" must return Credit\(advantages\), not None"),
        (lambda batch: batch.reward, r" must return Credit\(advantages\), not a Tensor"),
        (
            lambda batch: Credit(batch.reward.tolist(), axis="sequence"),
            ": column 'advantages' must be a tensor, not a l",
        ),
        (
            lambda batch: Credit(batch.reward[:, None], axis="sequence"),
            r": column 'advantages' .* shape \[\d+, 1\]",
        ),
        (lambda batch: Credit(batch.reward, axis="seq"), ": the axis of column 'advantages' is 'token' or 'sequence'"),
        (lambda batch: Credit(batch.reward), r": column 'advantages' has the shape \[10\], but there are \d+ tok"),
    ],
)
def test_an_estimator_that_returns_no_advantages_is_named_with_its_place(made: Any, words: str) -> None:
    class Own(Advantage):
        def estimate(self, batch: Batch) -> Credit:
            return made(batch)  # type: ignore[no-any-return]

    batch = Batch.from_groups(random_groups(0))
    with pytest.raises(DataError, match=rf"Own\.estimate \(.*test_own\.py:\d+\){words}"):
        Own()(batch)


def test_an_estimator_that_changes_the_rewards_or_divides_by_no_spread_is_named_with_its_place() -> None:
    class Centres(Advantage):
        def estimate(self, batch: Batch) -> Credit:
            centred = batch.reward
            centred -= centred.mean()
            return Credit(centred, axis="sequence")

    class Divides(Advantage):
        def estimate(self, batch: Batch) -> Credit:
            spread = batch.reward.std() * 0
            return Credit((batch.reward - batch.reward) / spread, axis="sequence")

    batch = Batch.from_groups(random_groups(0))
    with pytest.raises(DataError, match=r"Centres\.estimate \(.*test_own\.py:\d+\) changes 'reward' in place"):
        Centres()(batch)
    with pytest.raises(DataError, match=r"Divides\.estimate \(.*: the advantages of group '.*' are not finite: a divi"):
        Divides()(batch)


def test_the_group_of_an_advantage_that_is_not_finite_is_named() -> None:
    batch = Batch.from_groups(random_groups(0))

    class OfLastToken(Advantage):
        def estimate(self, batch: Batch) -> Credit:
            advantages = torch.zeros(len(batch))
            advantages[batch.trained_tokens[-1]] = math.nan
            return Credit(advantages)

    uid = batch.group_uids[int(batch.group[-1])]
    with pytest.raises(DataError, match=rf"OfLastToken\.estimate \(.*: the advantages of group '{uid}' are not finite"):
        OfLastToken()(batch)
