"""Learner and generator on one machine: taking turns, or on separate cores."""

import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_clusters import numbers
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.engines.torch.decoder import Decoder
from whet.engines.torch.generator import TorchGenerator
from whet.learner.worker import LearnerWorker
from whet.run.run import start


class Trace:
    """When who computed, and what the lease did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.moves: list[str] = []
        self._watch(monkeypatch, Decoder, "step", "generation")
        for method in ("score", "update"):
            self._watch(monkeypatch, LearnerWorker, method, "learning")
        for kind, name in ((TorchGenerator, "generation"), (LearnerWorker, "learning")):
            for move in ("sleep", "wake"):
                self._note(monkeypatch, kind, move, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, name: str) -> None:
        work = getattr(kind, method)

        def watched(*args: Any, **named: Any) -> Any:
            started = time.monotonic()
            try:
                return work(*args, **named)
            finally:
                self.spans.append((name, started, time.monotonic()))

        monkeypatch.setattr(kind, method, watched)

    def _note(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, name: str) -> None:
        move = getattr(kind, method)

        def noted(*args: Any) -> Any:
            self.moves.append(f"{name} {method}s")
            return move(*args)

        monkeypatch.setattr(kind, method, noted)

    def overlaps(self) -> int:
        learning = [(a, b) for name, a, b in self.spans if name == "learning"]
        sampling = [(a, b) for name, a, b in self.spans if name == "generation"]
        assert learning
        assert sampling
        return sum(start < b and a < end for start, end in sampling for a, b in learning)


AHEAD = {"rollouts": {"prompts_per_step": 3, "max_staleness": 1}, "sampling": {"max_new_tokens": 48}}


@pytest.mark.parametrize("placement", ["colocated", pytest.param("split", marks=pytest.mark.slow)])
def test_only_colocated_parts_never_compute_at_once_though_rollouts_run_ahead(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    trace = Trace(monkeypatch)
    start(toy_recipe(tiny_model, steps=3, devices={"placement": placement}, **AHEAD), tmp_path / "run")
    if placement == "split":
        assert trace.overlaps() > 0
        assert trace.moves == []
        return
    assert trace.overlaps() == 0
    moves = trace.moves
    assert moves[:2] == ["learning sleeps", "generation wakes"]
    assert moves.count("generation sleeps") >= 3
    for before, after in zip(moves[::2], moves[1::2], strict=True):  # always one after the other
        assert {before.split()[0], after.split()[0]} == {"learning", "generation"}
        assert (before.split()[1], after.split()[1]) == ("sleeps", "wakes")


def test_in_step_on_one_cpu_the_generator_holds_no_weights_while_the_learner_computes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    generators: list[TorchGenerator] = []
    build, update = TorchGenerator.__init__, LearnerWorker.update

    def built(self: TorchGenerator, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        generators.append(self)

    def updated(*args: Any) -> Any:
        released.extend(generator.engine.released for generator in generators)
        return update(*args)

    monkeypatch.setattr(TorchGenerator, "__init__", built)
    monkeypatch.setattr(LearnerWorker, "update", updated)
    start(toy_recipe(tiny_model, steps=3), tmp_path / "run")
    assert released == [True] * 3


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"cluster": {"type": "processes"}}, marks=pytest.mark.slow)],
    ids=["local", "processes"],
)
def test_taking_turns_changes_no_number(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    split = start(toy_recipe(tiny_model, steps=3, cluster={"type": "processes"}), tmp_path / "split")
    turns = start(toy_recipe(tiny_model, steps=3, devices={"placement": "colocated"}, **changes), tmp_path / "turns")
    assert numbers(turns) == numbers(split)


def test_the_moments_come_back_as_they_were(tiny_model: Path, tmp_path: Path) -> None:
    """On a CPU nothing moves; what is checked is that nothing is lost."""
    import torch

    from whet.learner.config import WorkerConfig
    from whet.learner.optimizer_config import OptimizerConfig
    from whet.models.config import ModelConfig

    worker = LearnerWorker(WorkerConfig(model=ModelConfig(path=str(tiny_model)), optimizer=OptimizerConfig()))
    assert worker.optimizer is not None
    for parameter in worker.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    worker.optimizer.step()
    before = {p: {k: v.clone() for k, v in kinds.items()} for p, kinds in worker.optimizer.state.items()}
    worker.sleep()
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    worker.wake()
    assert before.keys() == worker.optimizer.state.keys()
    assert all(kinds[k].equal(before[p][k]) for p, kinds in worker.optimizer.state.items() for k in before[p])


_TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed to divide them")
_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


@pytest.mark.usefixtures("forked_children")
@_TWO
@pytest.mark.parametrize("cluster", ["processes", pytest.param("ray", marks=[_RAY, pytest.mark.slow])])
def test_each_side_of_a_split_is_bound_to_its_own_cores(
    cluster: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[frozenset[int]]()
    step = Decoder.step

    def watched(self: Decoder) -> Any:
        seen.add(frozenset(os.sched_getaffinity(0)))  # of the generator's thread
        return step(self)

    monkeypatch.setattr(Decoder, "step", watched)
    recipe = toy_recipe(tiny_model, steps=1, cluster={"type": cluster}, devices={"learner_cores": 1})
    of_workers = cores_of_children_during(lambda: start(recipe, tmp_path / "run"))
    there = sorted(os.sched_getaffinity(0))
    assert of_workers == {frozenset(there[:1])}
    assert seen == {frozenset(there[1:])}
    assert os.sched_getaffinity(0) == set(there)


def cores_of_children_during(work: Any) -> set[frozenset[int]]:
    """Return the sets of cores that threads of children are bound to during ``work``, without the full set."""
    import psutil

    own, found, done = os.sched_getaffinity(0), set[frozenset[int]](), threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            for child in psutil.Process().children(recursive=True):
                try:
                    for thread in child.threads():
                        found.add(frozenset(os.sched_getaffinity(thread.id)))
                except (psutil.Error, OSError):
                    continue

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join()
    return found - {frozenset(own)}


def test_indivisible_or_unshareable_devices_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    for devices, words in (
        ({"placement": "colocated", "learner_cores": 1}, "leave them out"),
        ({"generator_cores": 1}, "set cluster=processes"),
    ):
        with pytest.raises(ConfigError, match=words):
            toy_recipe(tiny_model, devices=devices)
    many = toy_recipe(tiny_model, cluster={"type": "processes"}, devices={"learner_cores": 4096})
    with pytest.raises(ConfigError, match=r"learner_cores = 4096 .* are not possible"):
        start(many, tmp_path / "run")
