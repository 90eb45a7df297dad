"""A micro-batch does not wait for its device. On torch's device ``meta`` tensors have no values: whatever asks for one
between a batch and its gradients (``.item()``, ``bool()``, a choice by a mask) raises there."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.grids import taking_turns
from tests.learner.parts import SMALL, VOCABULARY, save_model
from tests.losses.cases import CASES, Case
from tests.tiny import tiny_qwen3
from whet.core.batch import ModelOutput
from whet.learner.model import build_whole
from whet.learner.passes import forward_backward
from whet.losses.implicit_reward import ImplicitReward
from whet.losses.preference import KTOLoss, PairLoss
from whet.metrics import Metrics
from whet.models.config import ModelConfig

META = torch.device("meta")
CHECKED = (PairLoss, KTOLoss, ImplicitReward)  # they look at rewards first, and refuse some


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("one"), tiny_qwen3(VOCABULARY, num_hidden_layers=1, **SMALL))


UNCHECKED = [one for one in CASES if not isinstance(one.loss, CHECKED)]
FIRST = {type(one.loss): one for one in reversed(UNCHECKED)}.values()


@pytest.mark.parametrize("case", taking_turns(UNCHECKED, FIRST), ids=lambda case: case.name)
def test_a_micro_batch_asks_its_device_for_no_value(
    case: Case, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which knows no meta
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    value_head = "values" in case.loss.outputs
    model = build_whole(ModelConfig(path=str(one_layer)), "float32", True, value_head, 0, META)
    batches, metrics = [case.make(seed)[0] for seed in range(2)], Metrics()

    def loss(number: int, output: ModelOutput) -> Tensor:
        value, reported = case.loss(output, batches[number].to(META))
        metrics.merge(reported)
        return value

    forward_backward(model, batches, case.loss.outputs, loss)
    assert all(parameter.grad is not None for parameter in model.model.get_decoder().parameters())
    with pytest.raises(NotImplementedError):
        metrics.read()
