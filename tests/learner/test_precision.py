"""The measured choice of how products are computed."""

import pytest
import torch

from whet.learner import precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def measured_anew():
    precision.fastest_on_cpu.cache_clear()
    yield
    precision.fastest_on_cpu.cache_clear()


def test_all_learners_of_a_process_get_what_was_measured_once(monkeypatch):
    chosen = precision.choose_matmul_precision("auto", "float32", CPU)
    monkeypatch.setattr(precision, "_measure", None)
    assert precision.choose_matmul_precision("auto", "float32", CPU) == chosen


@pytest.mark.parametrize(
    ("highest", "medium", "chosen"),
    [
        ((1.0, 2e-7), (0.5, 3e-7), "medium"),
        ((1.0, 2e-7), (0.98, 2e-7), "highest"),
        ((1.0, 2e-7), (0.2, 2e-3), "highest"),
    ],
    ids=["faster and as exact", "hardly faster", "faster by rounding"],
)
def test_medium_is_chosen_where_it_is_faster_and_as_exact(monkeypatch, highest, medium, chosen):
    times = {"highest": highest, "medium": medium}
    monkeypatch.setattr(precision, "_measure", lambda name, *_: times[name])
    assert precision.choose_matmul_precision("auto", "float32", CPU) == chosen


def test_measuring_is_real_and_leaves_the_setting_as_it_was():
    before = torch.get_float32_matmul_precision()
    assert precision.choose_matmul_precision("auto", "float32", CPU) in ("highest", "medium")
    assert torch.get_float32_matmul_precision() == before
    seconds, error = precision._measure("highest", 64, 128)
    torch.set_float32_matmul_precision(before)
    assert 0 < seconds < 1
    assert 0 < error < 1e-6


@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_nothing_is_measured_where_it_could_not_matter(monkeypatch, kind):
    monkeypatch.setattr(precision, "_measure", None)
    assert precision.choose_matmul_precision("auto", kind, CPU) == "highest"
    assert precision.choose_matmul_precision("medium", "float32", CPU) == "medium"
