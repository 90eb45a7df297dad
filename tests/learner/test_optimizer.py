"""The step, the schedule and the norm, against references."""

import math

import pytest
import torch

from tests.learner.parts import PolicyGradient, assert_close, cut, gradients, some_batch, weights, whole, worker
from whet.learner.optimizer import build_optimizer, learning_rate
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.optimizer_state import make_moments


def oracle(step, steps, lr, warmup, schedule, ratio):
    """The same curve, drawn by other means: a warm-up ramp, then a blend of the peak and the floor."""
    if step < warmup:
        return lr * (step + 1) / warmup
    t = (step - warmup) / (steps - warmup)
    blend = {"constant": 1, "linear": 1 - t, "cosine": math.cos(math.pi * t / 2) ** 2}[schedule]
    return lr * blend + lr * ratio * (1 - blend)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_learning_rate_follows_its_schedule(schedule, warmup, ratio):
    config = OptimizerConfig(lr=2e-4, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio)
    found = [learning_rate(config, step, 12) for step in range(12)]
    assert found == pytest.approx([oracle(step, 12, 2e-4, warmup, schedule, ratio) for step in range(12)])
    assert min(found) > 0


def test_a_run_that_goes_on_beyond_its_schedule_stays_at_the_minimum():
    config = OptimizerConfig(lr=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(config, 50, 10) == pytest.approx(0.1)


def test_norms_and_biases_do_not_decay():
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(layer.named_parameters(), OptimizerConfig(weight_decay=0.5, lr=0.1))
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)]
    assert changed == [True, False, False, False]


def test_moments_that_are_made_before_the_first_step_change_no_number():
    layers = [torch.nn.Linear(3, 2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [build_optimizer(layer.named_parameters(), OptimizerConfig(lr=0.1)) for layer in layers]
    for step in range(3):
        make_moments(optimizers[1])  # existing ones stay
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for p in layer.parameters():
                p.grad = torch.full_like(p, 0.5 - step)
            optimizer.step()
        assert all(a.equal(b) for a, b in zip(*(layer.parameters() for layer in layers), strict=True))
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys()
        assert all(one[kind].equal(other[kind]) for kind in one)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_steps_equal_torch_adamw_with_clipping_and_schedule(llama, max_norm):
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, warmup_steps=2, schedule="linear", max_grad_norm=max_norm, betas=(0.8, 0.9)
    )
    learner = worker(llama, optimizer=config, steps=4)
    before = weights(learner)
    reference = {name: torch.nn.Parameter(p) for name, p in before.items()}
    decayed = [p for p in reference.values() if p.dim() >= 2]
    others = [p for p in reference.values() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        fused=False,
        foreach=False,
    )
    for step, lr in enumerate([0.005, 0.01, 0.01, 0.005]):
        batch = some_batch(step)
        found = gradients(learner, whole(batch), PolicyGradient())
        for name, p in reference.items():
            p.grad = found[name]
        norm = torch.nn.utils.clip_grad_norm_(reference.values(), max_norm)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        update = learner.update(cut(batch, 30), PolicyGradient())
        assert update.lr == pytest.approx(lr)
        assert update.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        assert_close({name: p.detach() for name, p in reference.items()}, weights(learner))
        with torch.no_grad():  # the next step starts from the same weights to the last bit
            for name, p in learner.module.by_name():
                p.copy_(reference[name])
    assert learner.progress.step == 4


def test_many_micro_batches_make_the_same_step_as_one(llama):
    one, many = worker(llama), worker(llama)
    for step in range(3):
        one.update(whole(some_batch(step)), PolicyGradient())
        many.update(cut(some_batch(step), 16), PolicyGradient())
    assert_close(weights(one), weights(many), tolerance=1e-4)
