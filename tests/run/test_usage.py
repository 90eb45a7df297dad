"""The use of devices is counted per step and per device, and continued by a resumed run."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import whet
from tests.toy import toy_recipe
from whet.config import load
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.run import machine
from whet.run.recipe import Recipe
from whet.run.run import resume, start
from whet.run.usage import Usage


def test_a_step_is_measured_per_device():
    usage = Usage(devices=4, learning=2, peak=100.0, cost=3.0)
    lap = {"time/learn": 3.0, "time/score": 1.0, "time/step": 8.0}
    values = usage.step(lap, flops=4e14, rate=1000.0)
    assert values == {
        "time/tokens_per_second_per_device": 250.0,
        "time/score_share": 0.125,
        "time/learner/flops": 4e14,
        "time/learner/tflops": 50.0,
        "time/learner/mfu": 0.5,
    }
    assert usage.step(lap, flops=6e14, rate=1000.0)["time/learner/flops"] == pytest.approx(2e14)
    assert usage.spend(1800.0) == {"time/device_hours": 2.0, "time/cost": 6.0}
    assert usage.spend(1800.0)["time/device_hours"] == 4.0


def test_without_a_peak_or_a_price_neither_utilization_nor_cost_is_given():
    usage = Usage(devices=1, learning=1, peak=None, cost=None)
    assert "time/learner/mfu" not in usage.step({"time/learn": 1.0, "time/step": 1.0}, 1e12, 1.0)
    assert usage.step({"time/learn": 1.0, "time/step": 1.0}, 1e12, 1.0).keys().isdisjoint({"time/learner/flops"})
    assert usage.spend(3600.0) == {"time/device_hours": 1.0}


@pytest.mark.parametrize(
    ("hardware", "overrides", "devices"),
    [
        ("", [], (1, 1)),
        ("NVIDIA H100", [], (1, 1)),
        ("NVIDIA H100", ["generator=vllm", "generator.devices='\"2,3\"'", "generator.replicas=2"], (1, 3)),
        ("NVIDIA H100", ["generator=vllm", "generator.devices='\"0\"'", "devices.placement=colocated"], (1, 1)),
        ("NVIDIA H100", ["cluster=ray", "generator=vllm", "generator.on_cluster=true", "generator.tensor=2"], (1, 3)),
        (
            "NVIDIA H100",
            ["cluster=ray", "generator=vllm", "generator.on_cluster=true", "devices.placement=colocated"],
            (1, 1),
        ),
    ],
)
def test_devices_are_the_gpus_of_learners_and_engines(tmp_path, hardware, overrides, devices):
    recipe = load(Recipe, "quickstart", overrides).value
    facts = SimpleNamespace(hardware=hardware, ranks=1, precision="bfloat16")
    usage = Usage.of(recipe, tmp_path, {"policy": SimpleNamespace(facts=facts)})
    assert (usage.learning, usage.devices) == devices
    assert usage.peak == (989 if hardware else None)


def test_a_run_on_some_of_the_gpus_says_how_to_learn_on_all(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def said(hardware, ranks, *overrides):
        caplog.clear()
        facts = SimpleNamespace(hardware=hardware, ranks=ranks, precision="bfloat16", threads=1)
        recipe = load(Recipe, "quickstart", overrides).value
        Usage.of(recipe, tmp_path, {"policy": SimpleNamespace(facts=facts)})
        return caplog.messages

    (line,) = said("NVIDIA H100", 1)
    assert line == "this run uses 1 of the 2 GPUs here. To learn on several: cluster=processes parallel.fsdp=2"
    assert said("NVIDIA H100", 2) == said("", 1) == said("NVIDIA H100", 1, "cluster=ray", "cluster.address=auto") == []


def test_a_run_reports_its_use_and_a_resumed_one_continues_the_sum(tmp_path, tiny_model):
    recipe = toy_recipe(tiny_model, steps=2, sinks=["jsonl"], devices={"cost_per_hour": 2.0})
    folder = start(recipe, tmp_path / "run")
    resume(folder, ["steps=3"])
    lines = [line for line in read_metrics(folder / FILE) if "time/device_hours" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    hours = sum(line["time/step"] for line in lines) / 3600
    assert lines[-1]["time/device_hours"] == pytest.approx(hours)
    assert lines[-1]["time/cost"] == pytest.approx(2 * hours)
    assert all(line["time/learner/flops"] > 0 and 0 <= line["time/score_share"] <= 1 for line in lines)


def test_the_peak_of_a_machine_is_that_of_all_threads_that_learn(tmp_path):
    recipe = load(Recipe, "quickstart", []).value
    rates = {"linear_float32": 50.0, "linear_bfloat16": 100.0}
    decision = machine.Decision("bfloat16", "bfloat16", "measured", rates, {})
    (tmp_path / machine.FILE).write_text(json.dumps(asdict(decision)))
    facts = SimpleNamespace(hardware="", ranks=1, precision="bfloat16", threads=3)
    usage = Usage.of(recipe, tmp_path, {"policy": SimpleNamespace(facts=facts)})
    assert usage.peak == pytest.approx(0.3)


def test_a_learner_counts_the_threads_of_its_compute_thread(tmp_path, tiny_model):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with whet.open(toy_recipe(tiny_model, steps=1), folder=tmp_path / "run") as run:
            assert run.policy.learners["policy"].facts.threads == 3
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
