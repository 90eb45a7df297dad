"""The precision of a run: decided once, said, kept."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_precision import OLDER
from tests.tiny import tiny_llama
from tests.toy import read_settings, save_tiny_model, toy_recipe, toy_settings, write_settings
from whet.base.errors import ConfigError
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.models import precision
from whet.models.rates import Rates
from whet.run import machine

WRONG_TYPE = '{"learner": 32, "generator": null, "why": "", "rates": null, "instructions": {}}'
FAST, EMULATED, ALIKE = Rates(60, 160, 40, 90), Rates(60, 13, 43, 1.7), Rates(60, 60, 40, 40)


def wide():
    """Wide enough for its precision to matter."""
    return tiny_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "wide", wide)


def asking(folder: Path, learner: str = "auto", generator: str = "auto", **changes):
    settings = {"precision": learner} | changes.pop("more", {})
    return toy_recipe(folder, learner=settings, generator={"dtype": generator}, **changes)


@pytest.mark.parametrize(("rates", "chosen"), [(FAST, "bfloat16"), (EMULATED, "float32"), (ALIKE, "float32")])
def test_learner_and_generator_get_the_same(folder, monkeypatch, rates, chosen):
    monkeypatch.setattr(precision, "measure", lambda *_: rates)
    recipe, decision = machine.decide(asking(folder))
    assert (recipe.learner.precision, recipe.generator.dtype) == (chosen, chosen)
    assert (decision.learner, decision.generator) == (chosen, chosen)
    assert decision.rates is not None
    assert decision.rates["linear_float32"] == 60
    assert str(decision).startswith(f"{chosen} (")
    assert machine.decide(recipe)[0] == recipe


def test_what_the_recipe_says_stays(folder, monkeypatch):
    monkeypatch.setattr(precision, "measure", lambda *_: FAST)
    recipe, decision = machine.decide(asking(folder, learner="float32"))
    assert (recipe.learner.precision, recipe.generator.dtype) == ("float32", "bfloat16")
    assert str(decision).startswith("learner float32, generator bfloat16 (")


def test_nothing_is_measured_where_nothing_could_change(folder, monkeypatch):
    monkeypatch.setattr(precision, "measure", None)
    _, decision = machine.decide(asking(folder, learner="float32", generator="float64"))
    assert decision.why == "as the recipe says"


def test_a_run_that_samples_nothing_has_no_dtype(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "measure", lambda *_: FAST)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}", "completion": "x"}) + "\n" for i in range(20)))
    settings = {
        "steps": 1,
        "model": {"path": str(folder)},
        "algorithm": "sft",
        "data": {"type": "supervised", "path": str(rows), "batch_size": 4},
    }
    recipe, decision = machine.decide(read_settings(settings))
    assert (recipe.learner.precision, decision.generator) == ("bfloat16", None)
    assert not recipe.unused(), "the run's recipe is read again when it is resumed"


def test_bfloat16_that_is_emulated_is_warned_about_with_its_factor_and_what_to_set(folder, monkeypatch, caplog):
    monkeypatch.setattr(precision, "measure", lambda *_: EMULATED)
    recipe, _ = machine.decide(asking(folder, "bfloat16", "bfloat16"))
    assert recipe.learner.precision == "bfloat16", "a warning, not a refusal"
    (said,) = caplog.messages
    assert "learner.precision and generator.dtype = bfloat16, which this machine emulates" in said
    assert "takes 7.4 times as long" in said
    assert said.endswith("Set learner.precision=auto generator.dtype=auto, which is float32 here")


@pytest.mark.parametrize("rates", [FAST, ALIKE])
def test_bfloat16_that_is_not_slower_is_nothing_to_warn_about(folder, monkeypatch, caplog, rates):
    monkeypatch.setattr(precision, "measure", lambda *_: rates)
    machine.decide(asking(folder, "bfloat16", "bfloat16"))
    assert not caplog.messages


def test_gpus_that_the_run_does_not_use_are_warned_about(folder, monkeypatch, caplog):
    monkeypatch.setattr(precision, "measure", lambda *_: ALIKE)
    monkeypatch.setattr(machine, "unused_gpus", lambda: "torch 2.13.0+cpu is built without CUDA")
    machine.decide(asking(folder))
    (said,) = caplog.messages
    assert "but the run learns on the CPU: torch 2.13.0+cpu is built without CUDA" in said
    machine.decide(asking(folder, more={"device": "cpu"}))
    machine.decide(asking(folder), starts=False)
    assert caplog.messages == [said], "where the CPU is chosen, or nothing starts"


def test_float8_where_auto_is_float32_is_an_error_that_says_so(folder, monkeypatch):
    monkeypatch.setattr(precision, "measure", lambda *_: EMULATED)
    with pytest.raises(ConfigError, match="auto is float32 on this machine"):
        machine.decide(asking(folder, more={"float8": True}))


def test_a_quantized_engine_needs_bfloat16(folder, monkeypatch):
    monkeypatch.setattr(precision, "measure", lambda *_: EMULATED)
    config = wide().config
    assert VllmGeneratorConfig().resolve_auto(config).dtype == "float32"
    assert VllmGeneratorConfig(quantization="fp8").resolve_auto(config).dtype == "bfloat16"
    assert VllmGeneratorConfig(devices="0").resolve_auto(config).dtype == "bfloat16", "it computes on a GPU"


@pytest.mark.parametrize(("gpus", "learner"), [(1.0, "bfloat16"), (0.0, "float32"), (None, "float32")])
def test_workers_on_other_nodes_compute_as_their_gpus_do(folder, monkeypatch, gpus, learner):
    monkeypatch.setattr(precision, "measure", lambda *_: EMULATED)
    _, decision = machine.decide(asking(folder, cluster={"type": "ray", "gpus_per_rank": gpus}))
    assert decision.learner == learner
    assert decision.generator == "float32", "it computes here"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_run_keeps_its_decision_and_says_where_its_bits_can_not_be_the_same(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(precision, "measure", lambda *_: FAST)
    begun = machine.decide_run(asking(folder), tmp_path, resuming=False)
    monkeypatch.setattr(precision, "measure", lambda *_: ALIKE)
    assert machine.decide_run(begun, tmp_path, resuming=True) == begun
    assert not warned(caplog)
    kept = json.loads((tmp_path / machine.FILE).read_text())
    kept["instructions"]["instructions"] = "SVE256"
    (tmp_path / machine.FILE).write_text(json.dumps(kept))
    assert machine.decide_run(begun, tmp_path, resuming=True) == begun
    (said,) = warned(caplog)
    assert "instructions SVE256, here " in said
    assert "not the same bits" in said
    assert json.loads((tmp_path / machine.FILE).read_text()) == kept, "where it began stays on record"


def test_a_fact_that_an_older_record_lacks_is_not_a_difference(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(precision, "measure", lambda *_: FAST)
    begun = machine.decide_run(asking(folder), tmp_path, resuming=False)
    kept = json.loads((tmp_path / machine.FILE).read_text())
    del kept["instructions"]["MKL_limit"]
    (tmp_path / machine.FILE).write_text(json.dumps(kept))
    assert machine.decide_run(begun, tmp_path, resuming=True) == begun
    assert not warned(caplog)


def test_a_run_that_is_resumed_in_another_precision_says_so(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(precision, "measure", lambda *_: FAST)
    machine.decide_run(asking(folder), tmp_path, resuming=False)
    machine.decide_run(asking(folder, "float32", "float32"), tmp_path, resuming=True)
    (said,) = warned(caplog)
    assert "began in bfloat16 (" in said
    assert "continues in float32 (as the recipe says)" in said


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"learner": "float32"}', "\x00", WRONG_TYPE])
def test_a_damaged_record_does_not_keep_a_run_from_being_resumed(folder, tmp_path, text):
    (tmp_path / machine.FILE).write_text(text)
    assert machine.decide_run(asking(folder, "float32", "float32"), tmp_path, resuming=True)
    assert machine.read(tmp_path) is not None


def whet(*words: str | Path, **environment: str) -> str:
    command = [sys.executable, "-m", "whet", *map(str, words)]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_run_without_bfloat16_instructions_begins_in_float32_and_keeps_it_elsewhere(folder, tmp_path):
    settings = toy_settings(folder, steps=1, sinks=["console", "jsonl"], generator={"dtype": "auto"})
    recipe = write_settings(tmp_path / "toy.yaml", settings)
    said = whet("train", recipe, "--folder", tmp_path / "run", **OLDER)
    first = next(line for line in said.splitlines() if line.startswith("run: "))
    assert "· cpu · float32 (bfloat16 takes " in first
    assert "GFLOP/s in bfloat16" in first
    assert "computes in float32 (bfloat16 takes " in (tmp_path / "run" / "log.txt").read_text()
    assert "bfloat16 takes " in (tmp_path / "run" / "report.html").read_text()
    again = whet("resume", tmp_path / "run", "steps=2", ATEN_CPU_CAPABILITY="default")
    assert "warning: this run began on another machine (instructions AVX2, here " in again
    assert "\nrun: " in again, "what it computes in is said here too"
    assert "· float32 (bfloat16 takes " in again.partition("\nrun: ")[2].partition("\n")[0]
    assert machine.read(tmp_path / "run").learner == "float32"


@pytest.mark.slow
def test_bfloat16_without_instructions_for_it_is_warned_about(folder, tmp_path):
    settings = toy_settings(folder, learner={"precision": "bfloat16"}, generator={"dtype": "bfloat16"})
    said = whet("plan", write_settings(tmp_path / "toy.yaml", settings), **OLDER)
    assert "learner.precision and generator.dtype = bfloat16, which this machine emulates" in said
    assert "computes in bfloat16 (as the recipe says)" in said
