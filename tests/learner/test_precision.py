"""The measured choice of how products are computed."""

import pytest
import torch

from tests.learner.parts import PolicyGradient, assert_same, gradients, published, some_batch, whole, worker
from whet.learner import model, precision
from whet.models import rates
from whet.models.config import LoraSettings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def measured_anew():
    rates.fastest_matmul_precision.cache_clear()
    yield
    rates.fastest_matmul_precision.cache_clear()


def test_all_learners_of_a_process_get_what_was_measured_once(monkeypatch):
    chosen = precision.choose_matmul_precision("auto", "float32", CPU)
    monkeypatch.setattr(rates, "_time_float32", None)
    assert precision.choose_matmul_precision("auto", "float32", CPU) == chosen


@pytest.mark.parametrize(
    ("highest", "medium", "chosen"),
    [
        ((1.0, 2e-7), (0.5, 3e-7), "medium"),
        ((1.0, 2e-7), (0.85, 2e-7), "highest"),
        ((1.0, 2e-7), (0.2, 2e-3), "highest"),
    ],
    ids=["faster and as exact", "hardly faster", "faster by rounding"],
)
def test_medium_is_chosen_where_it_is_faster_and_as_exact(monkeypatch, highest, medium, chosen):
    measured = {"highest": highest, "medium": medium}
    monkeypatch.setattr(rates, "_time_float32", lambda name, *_: measured[name][0])
    monkeypatch.setattr(rates, "_error_float32", lambda name, *_: measured[name][1])
    assert precision.choose_matmul_precision("auto", "float32", CPU) == chosen


def test_pauses_of_the_machine_do_not_change_the_choice(monkeypatch):
    taken = iter([9.0, 9.0, 9.0, 1.0, 9.0, 9.0, *[1.0, 1.0] * 100])  # the first "highest" are slow, and a "medium"
    monkeypatch.setattr(rates, "_time_float32", lambda *_: next(taken))
    assert precision.choose_matmul_precision("auto", "float32", CPU) == "highest"


def test_measuring_is_real_and_leaves_the_setting_as_it_was():
    before = torch.get_float32_matmul_precision()
    assert precision.choose_matmul_precision("auto", "float32", CPU) in ("highest", "medium")
    assert torch.get_float32_matmul_precision() == before
    layer = rates._layer(64, 128)
    seconds, error = rates._time_float32("highest", *layer), rates._error_float32("highest", *layer)
    torch.set_float32_matmul_precision(before)
    assert seconds > 0
    assert 0 < error < 1e-6


@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_nothing_is_measured_where_it_could_not_matter(monkeypatch, kind):
    monkeypatch.setattr(rates, "_time_float32", None)
    assert precision.choose_matmul_precision("auto", kind, CPU) == "highest"
    assert precision.choose_matmul_precision("medium", "float32", CPU) == "medium"


def test_what_lora_leaves_frozen_is_kept_in_the_type_it_is_computed_in(tiny_model, monkeypatch):
    """Half the memory, no cast in every pass, and the same bits come out."""
    batch, lora = whole(some_batch()), LoraSettings(rank=4)
    own = worker(tiny_model, precision="bfloat16", lora=lora)
    monkeypatch.setattr(model, "keep_in_bfloat16", lambda *_: None)
    wide = worker(tiny_model, precision="bfloat16", lora=lora)
    kept = {(p.dtype, p.requires_grad) for name, p in own.module.by_name() if "_proj" in name}
    assert kept == {(torch.bfloat16, False), (torch.float32, True)}
    assert {p.dtype for name, p in own.module.by_name() if "_proj" not in name} == {torch.float32}
    assert_same(gradients(own, batch, PolicyGradient()), gradients(wide, batch, PolicyGradient()))
    for learner in (own, wide):
        learner.update(batch, PolicyGradient())
    assert_same(own.score(batch, {"logprobs"})[0], wide.score(batch, {"logprobs"})[0])
    merged = [tensor for name, tensor in published(own).items() if "_proj" in name]
    assert {tensor.dtype for tensor in merged} == {torch.float32}, "the update is not rounded away before it is sent"


def test_determinism_is_a_setting(tiny_model, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    worker(tiny_model)
    assert asked == []
    worker(tiny_model, learner={"deterministic": True, "device": "cpu"})
    assert asked == [True]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_narrow_stream_is_bfloat16_between_all_layers_and_learns_the_same_within_rounding(tiny_model, recompute):
    batch, learner = whole(some_batch()), {"activation_checkpointing": recompute}
    exact, wide, narrow = (
        worker(tiny_model, precision=kind, learner=learner) for kind in ("float32", "bfloat16", "bfloat16")
    )
    precision.bf16_residual_stream(narrow.model)
    seen: set[tuple[str, torch.dtype]] = set()
    for module in narrow.model.modules():
        name = type(module).__name__
        if name.endswith(("DecoderLayer", "Norm", "Attention")):
            module.register_forward_hook(
                lambda _, __, out, name=name: seen.add((name, (out[0] if isinstance(out, tuple) else out).dtype))
            )
    scores = [made.score(batch, {"logprobs"})[0]["logprobs"] for made in (exact, wide, narrow)]
    assert len(seen) == 3
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert not torch.equal(scores[1], scores[2])
    assert (scores[2] - scores[0]).abs().max() < 0.02
    right_ones = gradients(exact, batch, PolicyGradient())
    for name, gradient in gradients(narrow, batch, PolicyGradient()).items():
        assert gradient.dtype == torch.float32
        right = right_ones[name]
        assert (gradient - right).norm() < 0.1 * right.norm(), name
