"""Optimizers by name or path, and settings of parameters by name."""

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.learner.parts import PolicyGradient, assert_same, cut, published, some_batch, weights, whole, worker
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, WhetError
from whet.learner.optimizer import build_optimizer
from whet.learner.optimizer_config import OptimizerConfig, ParameterGroup
from whet.models.config import LoraSettings

TYPES: list[dict[str, Any]] = [
    {"type": "muon"},
    {"type": "muon", "settings": {"momentum": 0.8, "nesterov": False}},
    {"type": "adafactor"},
    {"type": "torch.optim:RMSprop", "settings": {"momentum": 0.5}},
    {"type": "tests.learner.test_optimizer_types:Counting"},
    {"type": "tests.learner.test_optimizer_types:Estimating"},
    {"type": "tests.learner.test_optimizer_types:Whitening"},
    {
        "groups": (
            {"match": "mlp", "lr": 1e-3},
            {"match": "embed_tokens|layers.0", "freeze": True},
        )
    },
]
every_type = pytest.mark.parametrize("settings", TYPES, ids=lambda s: s.get("type", "groups"))


class Counting(torch.optim.Optimizer):
    """Signed steps that become smaller; its count is a Python number, as in many published optimizers."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad.sign(), alpha=group["lr"] / state["count"])


class Estimating(torch.optim.Optimizer):
    """Keeps a count and an estimate in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "size": 1.0, "sizes": (1.0,), "mean": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["mean"] += 0.1
            group["size"] = sum(float(p.grad.abs().mean()) for p in group["params"]) + 0.5 * group["size"]
            group["sizes"] = (*group["sizes"], group["size"])
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] / group["count"] * (sum(group["sizes"]) + float(group["mean"])))


class Whitening(torch.optim.Optimizer):
    """Divides a momentum by norms of rows and of the whole matrix; keeps a count and a rate in its groups."""

    matrixwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "rate": torch.ones(())})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.zeros_like(p), "rows": torch.ones(len(p), dtype=p.dtype)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["rate"] = group["rate"] * 0.9
            for p in group["params"]:
                state = self.state[p]
                state["momentum"].lerp_(p.grad, 0.2)
                state["rows"] += p.grad.reshape(len(p), -1).norm(dim=1)
                size = state["rows"].view(-1, *[1] * (p.dim() - 1)) + p.norm() + state["momentum"].norm()
                p.sub_(state["momentum"] / size, alpha=group["lr"] * float(group["rate"]) / group["count"])


class Hoarding(Counting):
    """Keeps what can't be saved."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["model"] = object()


class Typed(Counting):
    """Says the types of its arguments."""

    def __init__(self, params: Any, lr: float = 1e-3, sizes: tuple[float, float] = (1.0, 1.0), flip: bool = False):
        super().__init__(params, lr)
        if sizes[0] > sizes[1]:
            raise RuntimeError("sizes must rise")


def optimizer(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, schedule="cosine", **settings)


@every_type
@pytest.mark.parametrize(
    "lora", [None, pytest.param(LoraSettings(rank=2), marks=pytest.mark.slow)], ids=["all", "lora"]
)
def test_a_resumed_learner_continues_bit_for_bit(
    qwen: Any, tmp_path: Any, settings: dict[str, Any], lora: LoraSettings | None
) -> None:
    if lora is not None and "groups" in settings:
        settings = {
            "groups": (
                {"match": "self_attn.*lora_A|mlp.*lora_B", "freeze": True},
                {"match": "lora_A", "lr": 1e-3},
            )
        }
    make = {"precision": "float32", "optimizer": optimizer(**settings), "lora": lora}
    straight = worker(qwen, **make)
    for step in range(2):
        straight.update(cut(some_batch(step), 30), PolicyGradient())
    straight.state.save(tmp_path)
    resumed = worker(qwen, seed=5, **make)
    resumed.state.load(tmp_path)
    assert resumed.progress.step == 2
    for step in (2, 3):
        before = weights(straight)
        straight.update(cut(some_batch(step), 30), PolicyGradient())
        straight.sleep()
        straight.wake()
        resumed.update(cut(some_batch(step), 30), PolicyGradient())
        assert any(not torch.equal(p, before[name]) for name, p in weights(straight).items())
    assert_same(weights(straight), weights(resumed))
    assert_same(published(straight), published(resumed))


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_a_step_is_that_of_torch(qwen: Any, kind: str) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, type=kind, max_grad_norm=1e9)
    learner = worker(qwen, optimizer=config)
    reference = {name: torch.nn.Parameter(p) for name, p in weights(learner).items()}

    def named(hidden: bool, matrix: bool) -> list[torch.nn.Parameter]:
        return [
            p
            for name, p in reference.items()
            if ("layers" in name and p.dim() == 2) == hidden and (p.dim() == 2) == matrix
        ]

    groups = [
        {"params": named(True, True), "weight_decay": 0.1},
        {"params": named(False, True), "weight_decay": 0.1},
        {"params": named(False, False), "weight_decay": 0.0},
    ]
    if kind == "adafactor":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adafactor(groups, lr=1e-2)]
    else:
        muon = torch.optim.Muon(groups[:1], lr=1e-2, adjust_lr_fn="match_rms_adamw")
        optimizers = [muon, torch.optim.AdamW(groups[1:], lr=1e-2)]
    for step in range(3):
        learner.accumulate(whole(some_batch(step)), PolicyGradient())
        for name, p in learner.module.by_name():
            reference[name].grad = p.grad.detach().clone()
        for one in optimizers:
            one.step()
        learner.update(whole(some_batch(step)), PolicyGradient())
        for name, p in weights(learner).items():
            torch.testing.assert_close(p, reference[name].detach(), msg=name)


def test_muon_takes_the_matrix_of_each_expert_alone() -> None:
    experts = torch.nn.Parameter(torch.randn(3, 6, 4))
    named = {
        "layers.0.mlp.experts.up_proj": experts,
        "layers.0.mlp.experts.up_proj_bias": torch.nn.Parameter(torch.ones(3, 6)),
    }
    alone = [torch.nn.Parameter(matrix) for matrix in experts.detach().clone()]
    optimizer = build_optimizer(named.items(), OptimizerConfig(lr=1e-2, weight_decay=0.1, type="muon"))
    reference = torch.optim.Muon(alone, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        experts.grad = torch.randn(3, 6, 4)
        for matrix, gradient in zip(alone, experts.grad, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(experts, torch.stack(alone))
    assert not any(parameter.dim() == 2 for group in optimizer.parts[0].param_groups for parameter in group["params"])


def test_a_type_without_further_settings_is_a_name() -> None:
    assert OptimizerConfig.model_validate({"type": "adamw"}) == OptimizerConfig()


def test_groups_change_rates_and_decay_and_freeze(qwen: Any) -> None:
    rules = (
        ParameterGroup(match="embed_tokens", freeze=True),
        ParameterGroup(match=r"mlp\.", lr=2e-3, weight_decay=0.0),
        ParameterGroup(match="norm", weight_decay=0.5),
    )
    learner = worker(qwen, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=4, weight_decay=0.1, groups=rules))
    before = weights(learner)
    learner.update(whole(some_batch()), PolicyGradient())
    names = {id(p): name for name, p in learner.module.by_name()}
    seen = {names[id(p)]: group for group in learner.optimizer.param_groups for p in group["params"]}
    assert not any("embed_tokens" in name for name in seen)
    for name, group in seen.items():
        assert group["lr"] == pytest.approx((2e-3 if ".mlp." in name else 1e-2) / 4)
        decay = 0.0 if ".mlp." in name else 0.5 if "norm" in name else 0.1
        assert group["weight_decay"] == (0.0 if name.endswith("bias") else decay)
    after = weights(learner)
    same = {name for name, p in before.items() if torch.equal(p, after[name])}
    assert {name for name in same if "embed_tokens" in name}
    assert not any(".mlp." in name for name in same)


class Stepless(torch.optim.Optimizer):
    """Has no step."""


class Forgetful(torch.optim.SGD):
    """Keeps the first group of parameters only."""

    def __init__(self, groups, lr):
        super().__init__(groups[:1], lr=lr)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": ({"match": "no_such_layer", "lr": 1.0},)}, "'no_such_layer' matches none of the"),
        ({"groups": ({"match": ".", "freeze": True},)}, "freezes every parameter"),
        ({"type": "torch.optim:Nothing"}, "optimizer.type: "),
        ({"type": f"{__name__}:Stepless"}, "Stepless has no step()"),
        ({"type": f"{__name__}:Forgetful"}, "Forgetful leaves out 1 of the 2 parameters that it gets"),
        ({"type": "torch.nn:Linear"}, "is not derived from torch.optim.Optimizer"),
        ({"type": "torch.optim:Muon"}, "set optimizer.type = muon, which leaves those to AdamW"),
        ({"type": "torch.optim:SGD", "settings": {"speed": 2}}, "optimizer.settings = {'speed': 2} of torch.optim:SGD"),
        ({"type": "torch.optim:SGD", "settings": {"momentum": -1}}, "Invalid momentum value: -1"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_named(settings: dict[str, Any], message: str) -> None:
    layer = torch.nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_optimizer(layer.named_parameters(), OptimizerConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"type": "moun"},
            "not a valid optimizer. Did you mean 'muon'? Known: adamw, muon, adafactor; or the path of a class, as in ",
        ),
        ({"settings": {"momentum": 0.9}}, "are for other types"),
        ({"type": "adafactor", "betas": (0.8, 0.9)}, "has no effect with type = adafactor"),
        ({"type": "muon", "moments": "8bit"}, "has no effect with type = muon"),
        ({"lr": 0.0, "groups": ({"match": "a", "lr": 1.0},)}, "set lr above 0"),
        ({"betas": (0.9, 1.0)}, "betas.1\n  Input should be less than 1"),
        ({"groups": ({"match": "("},)}, "not a valid regular expression"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        OptimizerConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "parallel", "message"),
    [
        ({"type": "torch.optim:LBFGS"}, {}, "computes the loss again within a step (its step() needs a closure)"),
        ({"type": "torch.optim:LBFGS"}, {"fsdp": 2}, "computes the loss again within a step"),
        (
            {"type": "tests.learner.test_optimizer_types:Estimating"},
            {"fsdp": 2},
            "A class that computes each number from its gradients alone may set elementwise = True, and one that "
            "computes each matrix from its gradients alone matrixwise = True",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_at_reading(
    tiny_model: Any, settings: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        toy_recipe(tiny_model, optimizer=settings, parallel=parallel)


def test_what_an_optimizer_keeps_in_its_groups_is_saved_or_named(qwen: Any, tmp_path: Any) -> None:
    hoarding = worker(qwen, optimizer=optimizer(type="tests.learner.test_optimizer_types:Hoarding"))
    hoarding.update(cut(some_batch(0), 30), PolicyGradient())
    with pytest.raises(WhetError, match=r"keeps in its parameter groups what can't be saved .*object is not JSON"):
        hoarding.state.save(tmp_path)
    kind = {"type": "tests.learner.test_optimizer_types:Estimating"}
    saved = worker(qwen, optimizer=optimizer(**kind))
    saved.update(cut(some_batch(0), 30), PolicyGradient())
    saved.state.save(tmp_path)
    other = worker(qwen, optimizer=optimizer(**kind, groups=({"match": "mlp", "lr": 1e-3},)))
    with pytest.raises(WhetError, match=r"saved with 2 parameter groups and has 3: resume with the optimizer\.groups"):
        other.state.load(tmp_path)


def test_a_checkpoint_of_another_optimizer_is_refused(qwen: Any, tmp_path: Any) -> None:
    saved = worker(qwen, optimizer=optimizer(type="muon"))
    saved.update(whole(some_batch()), PolicyGradient())
    saved.state.save(tmp_path)
    with pytest.raises(WhetError, match=r"saved with optimizer.type = muon, not adafactor"):
        worker(qwen, optimizer=optimizer(type="adafactor")).state.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("muon", {"ns_steps": None}, "settings.ns_steps: expected a whole number, got null"),
        ("muon", {"ns_steps": 0}, "settings.ns_steps: expected a number greater than or equal to 1, got the number 0"),
        ("muon", {"nesterov": "no"}, "settings.nesterov: expected true or false, got text 'no'"),
        ("muon", {"ns_coefficients": [1.0, 2.0]}, "settings.ns_coefficients.2: is missing"),
        ("muon", {"n_steps": 5}, "settings.n_steps is not a setting of muon. Did you mean 'ns_steps'?"),
        ("muon", {"weight_decay": 0.1}, "settings.weight_decay has no effect, because optimizer.weight_decay is used"),
        ("adafactor", {"eps": [0.1]}, "settings.eps.1: is missing"),
        ("torch.optim:SGD", {"weight_decay": 0.1}, "settings.weight_decay has no effect"),
        ("torch.optim:SGD", {"dampening": "x"}, "settings.dampening: expected a number, got text 'x'"),
        ("torch.optim:Adam", {"amsgrad": "no"}, "settings.amsgrad: expected true or false, got text 'no'"),
        ("torch.optim:Adam", {"betas": [0.9, 0.9, 0.9]}, "settings.betas: expected at most 2 items, got a list of 3"),
        ("tests.learner.test_optimizer_types:Typed", {"sizes": 3}, "settings.sizes: expected a list, got the number 3"),
        ("tests.learner.test_optimizer_types:Typed", {"sizes": [2, 1]}, "sizes must rise"),
    ],
)
def test_a_setting_of_a_wrong_type_is_named_before_the_first_step(
    kind: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_optimizer(torch.nn.Linear(2, 2).named_parameters(), optimizer(type=kind, settings=settings))


def test_a_rate_of_frozen_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="freeze = true leaves lr and weight_decay without effect"):
        ParameterGroup(match="embed_tokens", freeze=True, lr=1e-5, weight_decay=0.0)
