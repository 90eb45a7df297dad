"""The doctor finds what is missing and says how to get it."""

import types

import pytest

from whet.cli import doctor_checks as checks


def test_a_missing_or_old_package_is_broken_and_a_missing_extra_is_advice(monkeypatch):
    declared = [
        "pydantic>=2",
        "numpy>=99",
        "whet-no-such-package>=3",
        'whet-no-such-extra>=1; extra == "wandb"',
        'whet-for-tests; extra == "test"',
        'whet-for-other-systems; sys_platform == "none"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared)
    found = {finding.subject: finding for finding in checks.packages()}
    assert list(found) == ["python", "pydantic", "numpy", "whet-no-such-package", "whet-no-such-extra"]
    assert found["pydantic"].state == "good"
    assert (found["numpy"].state, found["numpy"].advice) == ("broken", 'pip install "numpy>=99"')
    assert found["whet-no-such-package"].advice == 'pip install "whet-no-such-package>=3"'
    assert (found["whet-no-such-extra"].state, found["whet-no-such-extra"].advice) == (
        "advice",
        'pip install "whet[wandb]"',
    )


def test_memory_is_plausible():
    total, free = checks.memory_gib()
    assert 0 < free <= total


def test_a_containers_share_of_the_processor_counts(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr("whet.processes.cores.QUOTA", tmp_path / "cpu.max")
    found = {finding.subject: finding.value for finding in checks.machine()}
    assert found["cores"].startswith("1 usable of ")


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


def test_measuring_the_speed_leaves_the_precision_as_it_was():
    import torch

    before = torch.get_float32_matmul_precision()
    (finding,) = checks.matmul_speed(size=64, budget_s=0.01)
    assert "float32 medium" in finding.value
    assert torch.get_float32_matmul_precision() == before


def test_a_gpu_is_measured_by_products_that_keep_it_busy(monkeypatch):
    import torch
    from torch.utils import benchmark

    asked = []

    class Timer:
        def __init__(self, statement, globals, num_threads):
            asked.append(globals["matrix"])

        def blocked_autorange(self, min_run_time):
            return types.SimpleNamespace(median=0.5)

    monkeypatch.setattr(benchmark, "Timer", Timer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    random = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: random(1, 1).expand(size).to(dtype))
    (finding,) = checks.matmul_speed()
    assert {matrix.shape for matrix in asked} == {(8192, 8192)}
    assert "(cuda)" in finding.subject


def test_a_recipe_that_does_not_load_is_broken(tmp_path, monkeypatch):
    import sys
    import types

    from tests.config.settings import Settings

    module = types.ModuleType("whet.recipe")
    module.Recipe = Settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "whet.recipe", module)
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
    from whet.processes import sandbox

    monkeypatch.setattr(sandbox, "offered", lambda: ("bubblewrap", ["namespaces: unshare: Operation not permitted"]))
    assert [(one.value, one.state) for one in checks.sandbox()] == [("by bubblewrap", "good")]
    monkeypatch.setattr(sandbox, "offered", lambda: (None, ["namespaces: unshare: Operation not permitted"]))
    (finding,) = checks.sandbox()
    assert finding.state == "advice"
    assert "Operation not permitted" in finding.value
