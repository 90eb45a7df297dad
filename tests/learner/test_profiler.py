"""A run profiles its learner in the steps that the recipe names, and no more than some micro-batches of each."""

import gzip
import json
from collections import Counter

import pytest

from tests.toy import toy_recipe
from whet.config import load
from whet.config.issues import RecipeError
from whet.run.recipe import Recipe
from whet.run.run import start


def operations(path):
    with gzip.open(path) as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"])


def test_a_profile_holds_the_micro_batches_that_were_asked_for_and_the_optimizer(tmp_path, tiny_model):
    found = {}
    for most in (1, 64):
        recipe = toy_recipe(
            tiny_model,
            steps=2,
            learner={"max_tokens": 136},
            algorithm={"loss": {"kl": {"coefficient": 0.1}}},
            evaluation={"enabled": False},
            profile={"steps": [2], "micro_batches": most},
        )
        folder = start(recipe, tmp_path / str(most)) / "profile"
        assert [path.name for path in folder.iterdir()] == ["step-000002.json.gz"]
        found[most] = operations(folder / "step-000002.json.gz")
        assert found[most]["aten::_fused_adamw_"]
    assert 0 < found[1]["aten::mm"] < found[64]["aten::mm"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.steps=[0]"], "expected at least 1"),
        (["profile.steps=[99]", "steps=9"], "profile.steps names step 99, but the run has 9 steps"),
        (["profile.steps=[1,2,3,4,5,6,7,8,9,10,11]"], "profile.steps"),
        (["profile.steps=[1]", "profile.micro_batches=0"], "profile.micro_batches"),
        (["profile.micro_batches=2"], "only where profile.steps names steps"),
    ],
)
def test_wrong_steps_are_named(overrides, message):
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")):
        load(Recipe, "quickstart", overrides)
