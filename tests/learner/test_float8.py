"""Settings that don't support float8 or 8-bit moments are refused before a run starts."""

import sys

import pytest
import torch
from torch import nn

from tests.tiny import tiny_llama
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.learner.optimizer import build_optimizer
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.precision import _fits, use_float8


def test_a_device_without_float8_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or more.*computes on cpu"):
        use_float8(tiny_llama(), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match="computes on cuda:0"):
        use_float8(tiny_llama(), torch.device("cuda", 0))


def test_without_torchao_it_is_said_what_to_install(monkeypatch):
    for name in ("torchao", "torchao.float8", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"learner\.float8.*whet\[torchao\]"):
        use_float8(tiny_llama(), torch.device("cpu"), emulate=True)
    with pytest.raises(ConfigError, match=r"optimizer\.moments.*8bit.*whet\[torchao\]"):
        build_optimizer(nn.Linear(2, 2).named_parameters(), OptimizerConfig(moments="8bit"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner": {"float8": True, "precision": "float32"}}, r"learner\.float8 = true needs precision = bfloat16"),
        ({"learner": {"float8": True, "precision": "bfloat16"}, "model": {"lora": {}}}, "and no LoRA"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_recipe(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        toy_recipe(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [("0.mlp.gate_proj", (32, 48), True), ("0.mlp.gate", (32, 16), False), ("0.o_proj", (40, 32), False),
     ("0.o_proj", (32, 40), False)],
)  # fmt: skip
def test_routers_and_sizes_that_the_kernel_does_not_take_stay(name, shape, fits):
    assert _fits(nn.Linear(*shape), name) == fits
