"""The doctor reports missing parts and how to install them."""

from pathlib import Path

import pytest

from whet.cli.doctor import summary
from whet.diagnose import checks
from whet.models.rates import Rates


def test_a_missing_or_old_package_is_broken_and_extras_are_listed(monkeypatch):
    declared = [
        "pydantic>=2",
        "numpy>=99",
        "whet-no-such-package>=3",
        'whet-no-such-extra>=1; extra == "wandb"',
        'rich>=1; extra == "tasks"',
        'rich>=99; extra == "data"',
        'whet-for-tests; extra == "test"',
        'whet-for-other-systems; sys_platform == "none"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared)
    found = {finding.subject: finding for finding in checks.packages()}
    extras = ["whet[tasks]", "whet[data]", "whet[wandb]"]
    assert list(found) == ["python", "numpy", "whet-no-such-package", "packages", *extras]
    assert found["packages"].state == "good"
    assert found["packages"].value.startswith("1 as declared: pydantic")
    assert (found["numpy"].state, found["numpy"].advice) == ("broken", 'pip install "numpy>=99"')
    assert found["whet-no-such-package"].advice == 'pip install "whet-no-such-package>=3"'
    wandb, data = found["whet[wandb]"], found["whet[data]"]
    assert (wandb.state, wandb.advice) == ("good", "pip install 'whet[wandb]'")
    assert wandb.value.endswith("without whet-no-such-extra")
    assert (data.state, "outside >=99" in data.value) == ("advice", True)
    assert (found["whet[tasks]"].state, found["whet[tasks]"].advice) == ("good", "")


def test_memory_is_plausible():
    total, free = checks.memory_gib()
    assert 0 < free <= total


def test_a_containers_share_of_the_processor_counts(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr("whet.processes.machine.QUOTA", tmp_path / "cpu.max")
    found = {finding.subject: finding.value for finding in checks.machine()}
    assert found["cores"].startswith("1 usable of ")


def test_gpus_that_torch_can_not_use_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr("whet.models.device.unused_gpus", lambda: "torch 2.13.0 is built without CUDA")
    found = {finding.subject: finding for finding in checks.machine()}
    assert (found["GPU"].state, found["GPU"].advice) == ("advice", "torch 2.13.0 is built without CUDA")


@pytest.mark.parametrize(("policy", "state"), [("", "good"), ("PASSIVE", "advice"), ("active", "advice")])
def test_a_waiting_policy_is_advised_against_and_more_threads_than_cores_too(monkeypatch, policy, state):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    found = {finding.subject: finding for finding in checks.threads()}
    assert found["OMP_WAIT_POLICY"].state == state
    assert found["OMP_NUM_THREADS"].state == "advice"


@pytest.mark.parametrize(("second", "state"), [("libgomp-a1.so.1", "good"), ("libiomp5.so", "advice")])
def test_two_runtimes_of_openmp_in_one_process_are_named(tmp_path, second, state):
    lines = [f"7f00-7f01 r-xp 0 08:01 1   /venv/lib/{name}\n" for name in ("libgomp-a1.so.1", second)]
    (tmp_path / "maps").write_text("".join(lines))
    (finding,) = checks._runtimes(tmp_path / "maps")
    assert finding.state == state
    assert second in finding.value


@pytest.mark.parametrize(
    ("rates", "states", "said"),
    [
        (Rates(70, 160, 40, 90), ["good", "good"], ""),
        (Rates(70, 13, 43, 1.7), ["advice", "advice"], "bfloat16 is emulated"),
        (Rates(70, 65, 43, 1.7), ["good", "advice"], "bfloat16 is emulated"),
        (Rates(2.0, 0.5, 1.5, 0.04), ["advice", "advice"], "slow in both"),
    ],
    ids=["fast", "emulated", "batched products emulated", "slow"],
)
def test_what_is_slow_is_not_ok(rates, states, said):
    found = list(checks.rates_judged(rates, "on one core"))
    assert [finding.subject for finding in found] == ["linear layers", "batched products"]
    assert [finding.state for finding in found] == states
    assert said in found[1].advice


def test_no_rate_is_printed_as_zero():
    slow = next(checks.rates_judged(Rates(2.0, 0.04, 1, 1), "on one core"))
    assert slow.value == "2.0 GFLOP/s in float32, 0.04 in bfloat16, on one core"


def test_products_are_measured_at_the_shapes_of_the_recipes_model(tmp_path, monkeypatch):
    from tests.toy import save_tiny_model, toy_recipe
    from whet.models import rates

    asked = []
    monkeypatch.setattr(rates, "measure", lambda shapes, device: asked.append((shapes, device)) or Rates(1, 2, 3, 4))
    list(checks.products(toy_recipe(save_tiny_model(tmp_path / "model"))))
    assert asked == [(rates.Shapes(64, 128, 4, 2, 32), "cpu")]


def test_a_recipe_that_asks_for_emulated_bfloat16_is_advised(tmp_path, monkeypatch):
    from tests.tiny import tiny_llama
    from tests.toy import save_tiny_model, toy_recipe
    from whet.models import precision, rates

    for module in (rates, precision):
        monkeypatch.setattr(module, "measure", lambda *_: Rates(70, 13, 43, 1.7))
    folder = save_tiny_model(tmp_path / "model", lambda: tiny_llama(hidden_size=256, num_hidden_layers=1))
    recipe = toy_recipe(folder, learner={"precision": "bfloat16"})
    *_, finding = checks.products(recipe)
    assert (finding.subject, finding.state) == ("precision", "advice")
    assert finding.advice == "the recipe sets bfloat16, which is emulated here: set learner.precision=auto"


def test_the_summary_repeats_what_is_wrong_with_what_to_do():
    good, slow = checks.Finding("cores", "2"), checks.Finding("linear layers", "1", "advice", "buy another one")
    missing = checks.Finding("torch", "not installed", "broken", "pip install torch")
    assert summary([good]) == "nothing that a run needs is broken"
    assert summary([good, slow]) == "advice: linear layers -> buy another one\nnothing that every run needs is broken"
    assert summary([slow, missing]).splitlines()[0] == "broken: torch -> pip install torch"
    assert "nothing" not in summary([slow, missing])


def test_a_missing_model_is_broken_for_a_recipe_that_starts_from_it(tmp_path, monkeypatch):
    from tests.toy import save_tiny_model, toy_recipe
    from whet.config import load
    from whet.fetch import smollm2
    from whet.run.recipe import Recipe

    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(smollm2, "installed_package", lambda: None)

    def state(recipe: Recipe | None) -> str:
        *_, finding = checks.model_cache(recipe)
        assert finding.advice.endswith(smollm2.install_command())
        assert "optional" not in finding.value
        return finding.state

    own = toy_recipe(save_tiny_model(tmp_path / "model"))
    assert [state(None), state(load(Recipe, "quickstart").value), state(own)] == ["advice", "broken", "advice"]


def test_memory_is_compared_with_the_plan_of_the_recipe(tmp_path, monkeypatch):
    from tests.toy import save_tiny_model, toy_recipe
    from whet.diagnose.plan import make_plan

    recipe = toy_recipe(save_tiny_model(tmp_path / "model"))
    monkeypatch.setattr("whet.diagnose.memory.resident", lambda: 2**29)  # which grows with each test
    peak = make_plan(recipe, 2**29).processes["this process"].peak() / 2**30
    monkeypatch.setattr(checks, "memory_gib", lambda: (8.0, 7.0))
    (enough,) = checks.memory("mine.yaml", recipe)
    assert enough.state == "good"
    assert f"mine.yaml needs at most {peak:.1f} (whet plan mine.yaml)" in enough.value
    monkeypatch.setattr(checks, "memory_gib", lambda: (8.0, 0.01))
    (scarce,) = checks.memory("mine.yaml", recipe)
    assert scarce.state == "advice"


def test_a_recipe_that_does_not_load_is_broken(tmp_path, monkeypatch):
    import sys
    import types

    from tests.config.settings import Settings

    module = types.ModuleType("whet.run.recipe")
    module.Recipe = Settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "whet.run.recipe", module)
    (tmp_path / "good.yaml").write_text("steps: 3\n")
    (tmp_path / "bad.yaml").write_text("stepz: 3\n")
    monkeypatch.chdir(tmp_path)
    found = list(checks.recipes_validate(["good.yaml", "bad.yaml"], []))
    assert [finding.subject for finding in found] == ["recipe bad.yaml"]
    assert found[0].state == "broken"
    assert "Did you mean 'steps'?" in found[0].value
    assert next(checks.recipes_validate(["good.yaml"], [])).state == "good"


def test_a_setting_on_the_command_line_is_checked_too(capsys):
    from whet.cli.main import main

    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "quickstart", "stepz=1"])
    assert "override 1 (stepz=1): stepz: unknown key. Did you mean 'steps'?" in capsys.readouterr().out


def test_a_recipe_that_samples_is_tried(tmp_path, capsys):
    from tests.toy import save_tiny_model, toy_recipe, write_recipe
    from whet.cli.main import main

    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(save_tiny_model(tmp_path / "model")))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(recipe), "steps=1"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "ok      agreement" in said
    assert "sampled tokens" in said


def test_the_sandbox_is_checked_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.sandbox import sandbox

    problems = ["namespaces: unshare: Operation not permitted"]
    monkeypatch.setattr(sandbox, "available_isolation", lambda: ("bubblewrap", problems))
    assert [(one.value, one.state) for one in checks.sandbox()] == [("by bubblewrap", "good")]
    monkeypatch.setattr(sandbox, "available_isolation", lambda: (None, problems))
    (finding,) = checks.sandbox()
    assert finding.state == "advice"
    assert "Operation not permitted" in finding.value


def test_a_user_without_a_home_folder_is_told_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WHET_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert [finding.advice for finding in checks.model_cache()] == [
        "there is no folder for the cache: Could not determine home directory. Name one: WHET_CACHE=FOLDER"
    ]
