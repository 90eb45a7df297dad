"""Built-in recipes load fast, and settings that would exhaust the memory or are meaningless are refused."""

import json
import subprocess
import sys

import pytest

from whet.config import RecipeError, list_recipes, load
from whet.run.recipe import Recipe

READ_ALL = """
import json, resource, sys
from whet.config import RecipeError, list_recipes, load
from whet.run.recipe import Recipe
heavy = {"torch", "transformers", "datasets", "peft", "reasoning_gym", "ray"}
found = {}
for name in list_recipes():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    load(Recipe, name)
    try:
        load(Recipe, name, ["stepz=3"])
    except RecipeError as error:
        assert "Did you mean 'steps'?" in str(error)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start
    found[name] = {"imported": sorted(heavy & sys.modules.keys()), "seconds": seconds}
    for module in [module for module in sys.modules if module.split(".")[0] in heavy]:
        del sys.modules[module]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def read() -> dict[str, dict]:
    """Return the imports and the CPU time of a process that reads every recipe, and one with an unknown key."""
    done = subprocess.run([sys.executable, "-c", READ_ALL], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_recipe_is_read_at_once_and_without_heavy_libraries(read, recipe):
    assert read[recipe]["imported"] == []
    assert read[recipe]["seconds"] < 10.0  # of CPU time; 0.1 on a free core


@pytest.mark.parametrize("recipe", [name for name in list_recipes() if name.endswith("quickstart")])
def test_learning_rates_of_all_weights_are_not_taken_for_adapters(recipe):
    loaded = load(Recipe, recipe).value
    trains_adapters = loaded.model.lora is not None
    assert trains_adapters == (recipe == "quickstart")
    assert (loaded.optimizer.lr > 1e-4) == trains_adapters


def complaint(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(Recipe, "quickstart", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollouts.prompts_per_step=1000000000", "8,000,000,000 episodes at once; at most 1,000,000 are possible"),
        ("algorithm.group_size=100000000000000000000", "algorithm.group_size = 100000000000000000000"),
        ("rollouts.concurrency=1000000000", "rollouts.concurrency: expected greater than 0 and at most 100000"),
        ("evaluation.samples=1000000000", "evaluation.samples: expected greater than 0 and at most 100000"),
        ("data.train_size=100000000000", "data.train_size: expected at least 1 and at most 10000000"),
        ("generator.max_batch=1000000000", "generator.max_batch: expected at least 1 and at most 100000"),
        ("rollouts.max_staleness=100000", "= 8, 100000 steps ahead (rollouts.max_staleness), are 6,400,064 episodes"),
        ("generator.threads=10000000", "generator.threads: expected at least 1 and at most 10000"),
        ("model.lora.rank=10000000", "model.lora.rank: expected at least 1 and at most 100000"),
        ("weights.bucket_mb=1e308", "weights.bucket_mb: expected greater than 0 and at most 1000000"),
        ("data.grader.limits.memory_gib=1e308", "data.grader.limits.memory_gib: expected greater than 0 and at most"),
        ("data.grader.limits.workers=1000000", "data.grader.limits.workers: expected at least 1 and at most 1000"),
    ],
)
def test_settings_that_would_exhaust_the_memory_are_refused_with_the_limit(override, expected):
    assert expected in complaint(override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=0", "set steps (as in steps=100) or epochs (as in epochs=3): neither is given"),
        ("evaluation.patience=2", "evaluation: patience counts evaluations during the run: set evaluation.every"),
        ("learner.max_tokens=8", "sampling.max_prompt_tokens + sampling.max_new_tokens"),
    ],
)
def test_an_override_that_does_not_fit_the_recipe_is_the_place_of_the_error(override, expected):
    assert complaint(override).startswith(f"override 1 ({override}): {expected}")


@pytest.mark.parametrize("key", ["sampling.temperature", "evaluation.temperature"])
@pytest.mark.parametrize("value", ["1e-300", "1e300"])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(key, value):
    assert f"{key}: expected 0 (the most likely token) or a number from 0.001 to 1000, got" in complaint(
        f"{key}={value}"
    )


def test_an_empty_text_to_stop_at_is_refused():
    assert "sampling.stop.0: expected a text of at least 1 character, got text ''" in complaint('sampling.stop=[""]')


def test_a_runtime_environment_of_an_unknown_worker_is_refused():
    from whet.cluster.config import WORKERS
    from whet.engines.remote import HostedEngine
    from whet.learner.worker import LearnerWorker

    said = complaint("cluster.type=ray", "cluster.runtime_env.LernerWorker={pip: [numpy]}")
    assert "cluster.runtime_env: 'LernerWorker' is not a worker. Did you mean 'LearnerWorker'?" in said
    assert (LearnerWorker.__name__, HostedEngine.__name__) == WORKERS
    known = load(Recipe, "quickstart", ["cluster.type=ray", "cluster.runtime_env.LearnerWorker={pip: [numpy]}"])
    assert known.value.cluster.runtime_env == {"LearnerWorker": {"pip": ["numpy"]}}


def test_arguments_of_the_chat_template_reach_the_renderer(tmp_path):
    from tests.tiny import CHAT_TEMPLATE
    from tests.toy import save_tiny_model
    from whet.base.errors import ConfigError
    from whet.run.build import build_renderer

    template = tmp_path / "recipe.yaml"
    lines = ["extends: quickstart", f"model: {{path: {save_tiny_model(tmp_path / 'model')}}}"]
    lines.append(f"chat_template: {json.dumps('{% if not enable_thinking %}short {% endif %}' + CHAT_TEMPLATE)}")
    template.write_text("\n".join([*lines, "template_arguments: {enable_thinking: false}"]))
    question = [{"role": "user", "content": "q"}]

    def prompt(*overrides: str) -> str:
        renderer = build_renderer(load(Recipe, template, overrides).value)
        return renderer.decode(renderer.render_prompt(question))

    assert prompt().startswith("short ")
    assert not prompt("template_arguments.enable_thinking=true").startswith("short ")
    with pytest.raises(ConfigError, match=r"'enable_thinkin' is not read by .* Did you mean 'enable_thinking'\?"):
        prompt("template_arguments.enable_thinkin=true")
    with pytest.raises(ConfigError, match=r"template_arguments: 'messages' is set by whet"):
        prompt("template_arguments.messages=[]")


def test_tools_whose_results_are_never_read_are_warned_of() -> None:
    blend = "{type: blend, of: {sums: {taskset: arithmetic}, tools: {taskset: calculator}}}"
    for data, where in (
        ("{type: calculator}", "data"),
        ("{type: workers, taskset: calculator}", "data"),
        (blend, "data.of.tools"),
    ):
        found = [load(Recipe, "quickstart", [f"sampling.max_turns={n}", f"data={data}"]) for n in (1, 2)]
        warned = [f"max_turns = 1, and {where} has tools" in " ".join(each.value.warnings()) for each in found]
        assert warned == [True, False], data
    lowered = [f"data={blend}", "sampling.max_turns=2", "data.of.tools.sampling.max_turns=1"]
    [warning] = load(Recipe, "quickstart", lowered).value.warnings()
    assert "max_turns = 1, and data.of.tools has tools" in warning


def test_a_recipe_without_a_sandbox_is_warned_of() -> None:
    found = [load(Recipe, "quickstart", ["data={type: code, sandbox: " + one + "}"]) for one in ("none", "required")]
    assert ["with your rights" in " ".join(loaded.value.warnings()) for loaded in found] == [True, False]
