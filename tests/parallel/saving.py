"""Learners that save and resume, on one rank or several, and the contents of their folders."""

import asyncio
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.learner.parts import PolicyGradient
from tests.parallel.cases import Case, build, full_weights, micro_batches
from tests.parallel.ranks import on_ranks
from tests.tiny import tiny_tokenizer
from whet.base.errors import WhetError
from whet.checkpoint.export import export
from whet.checkpoint.store import CheckpointStore
from whet.parallel.parameters import local


@torch.compiler.set_stance("force_eager")  # of the optimizer with moments in 8 bits
def resume(rendezvous: str, rank: int, case: Case, source: Path | None, target: Path | None, steps: range) -> Any:
    """Load, train, save; return the weights before and after training, and the step."""
    worker = build(case, rendezvous, rank)
    if source is not None:
        worker.state.load(source)
    before = full_weights(worker)
    for step in steps:
        worker.update(micro_batches(case, worker, step), PolicyGradient())
    after = full_weights(worker)
    if target is not None:
        worker.state.save(target)
    return before, after, worker.progress.step


def folders(tmp_path: Path, *names: str) -> list[Path]:
    paths = [tmp_path / name for name in names]
    for folder in paths:
        folder.mkdir()
    return paths


def assert_weights_unchanged(runs: list[Any]) -> None:
    """Assert that each result of ``resume`` began with the last weights of the one before, bit for bit."""
    for (_, saved, _), (loaded, _, _) in pairwise(runs):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved | loaded)


def load_error(rendezvous: str, rank: int, case: Case, folder: Path) -> tuple[str, bool]:
    """Return the error of loading ``folder``, and whether the weights are unchanged."""
    worker = build(case, rendezvous, rank)
    before = full_weights(worker)
    with pytest.raises(WhetError) as caught:
        worker.state.load(folder)
    after = full_weights(worker)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


def save_damaged(rendezvous: str, rank: int, case: Case, folder: Path) -> tuple[str, str]:
    """Return the errors of both kinds of saving where a weight on the last rank is not finite."""
    worker = build(case, rendezvous, rank)
    if rank == case.ranks - 1:
        with torch.no_grad():
            [part for _, tensor in worker.module.by_name() if (part := local(tensor)).numel()][-1].fill_(torch.nan)
    errors = []
    for save in (worker.state.save, worker.state.begin_save):
        with pytest.raises(WhetError) as caught:
            save(folder)
        errors.append(str(caught.value))
    return errors[0], errors[1]


def save_twice(rendezvous: str, rank: int, case: Case, stopped: Path, background: Path) -> None:
    """Save once with training stopped, and once during training."""
    worker = build(case, rendezvous, rank)

    def update(step: int) -> None:
        worker.update(micro_batches(case, worker, step), PolicyGradient())

    update(0)
    worker.state.save(stopped)
    worker.state.begin_save(background)
    for step in range(1, 4):
        update(step)
    worker.state.finish_save()


def exported(case: Case, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return (the exported folder of a model after one step on two ranks, in float32; their weights)."""
    base, run, [shards] = folder / "base", folder / "run", folders(folder, "shards")
    shutil.copytree(case.model, base)
    tiny_tokenizer().save_pretrained(base)
    case = replace(case, model=base, learner={"precision": "float32"})
    _, weights, _ = on_ranks(2, resume, case, None, shards, range(1))[0]
    store = CheckpointStore(run / "checkpoints")
    asyncio.run(store.save(1, lambda folder: shutil.copytree(shards, folder / "policy") and None, {}))
    lora = {"lora": {"rank": 2, "alpha": 4.0}} if case.lora else {}
    (run / "recipe.yaml").write_text(json.dumps({"model": {"path": str(base), **lora}, "chat_template": None}))
    export(run, folder / "out")
    return folder / "out", weights


def pieces(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of a folder, by name and place in the full tensor; any rank may write copies."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata().get("DCP_SHARDING_INFO", "{}"))
            tensors |= {f"{name} {places.get(name)}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def assert_same_files(first: Path, second: Path) -> None:
    """Assert that two folders have the same contents, bit for bit."""
    a, b = pieces(first), pieces(second)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_passes_through_one_rank(case: Case, folder: Path) -> None:
    """Assert that a checkpoint of four ranks is the same, in weights and moments, after one rank has loaded and saved
    it."""
    four, single, again = folders(folder, "four", "one", "again")
    outputs = on_ranks(4, resume, case, None, four, range(1))
    left = {name: tensor for _, weights, _ in outputs for name, tensor in weights.items()}
    loaded, _, _ = resume("", 0, case.one_rank(), four, single, range(0))
    assert left.keys() == loaded.keys()
    assert all(torch.equal(left[name], loaded[name]) for name in left)
    on_ranks(4, resume, case, single, again, range(0))
    assert_same_files(four, again)
