"""Memory of a run: Python's garbage collector runs seldom, so nothing that holds tokens or tensors is left to it."""

import gc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.toy import toy_recipe
from whet.run import run

ROOMS = ("whet.core.", "whet.engines.", "whet.learner.", "whet.models.", "whet.rollouts.", "whet.tasks.")


@pytest.fixture
def unreachable() -> Iterator[list[Any]]:
    """The objects that only the garbage collector could free from now on, once it has run."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.collect()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="in step", marks=pytest.mark.slow),
        pytest.param({"rollouts": {"prompts_per_step": 3, "max_staleness": 1}}, id="one step off"),
        pytest.param(
            {"data": {"type": "tests.toy:Flaky", "failures": {"toy/train/1": 1, "toy/train/2": 1}, "met": {}}},
            id="with attempts that fail",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_does_not_wait_for_the_garbage_collector(
    tiny_model: Path, tmp_path: Path, unreachable: list[Any], changes: dict[str, Any]
) -> None:
    left: list[str] = []

    def on_step(step: int, values: dict[str, Any]) -> None:
        gc.collect()
        ours = [each for each in unreachable if type(each).__module__.startswith(ROOMS)]
        held = [each for each in unreachable if isinstance(each, Tensor | nn.Module | array)]
        left.extend(f"step {step}: {type(each).__name__}" for each in ours + held)

    run.start(toy_recipe(tiny_model, steps=2, checkpoints={"every": 1}, **changes), tmp_path / "run", on_step=on_step)
    assert not left
