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
from tests.parallel.cases import Case, build, gathered, micro_batches
from tests.parallel.ranks import on_ranks
from tests.tiny import tiny_tokenizer
from whet.base.errors import WhetError
from whet.checkpoint.export import export
from whet.checkpoint.store import CheckpointStore


def go_on(rendezvous: str, rank: int, case: Case, come_from: Path | None, go_to: Path | None, steps: range) -> Any:
    """Load, train, save; the weights before and after training."""
    worker = build(case, rendezvous, rank)
    if come_from is not None:
        worker.state.load(come_from)
    before = gathered(worker)
    for step in steps:
        worker.update(micro_batches(case, worker, step), PolicyGradient())
    after = gathered(worker)
    if go_to is not None:
        worker.state.save(go_to)
    return before, after, worker.progress.step


def folders(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def assert_handed_on(said: list[Any]) -> None:
    """Each of what ``go_on`` returned began with the weights that the one before left, to the last bit."""
    for (_, saved, _), (loaded, _, _) in pairwise(said):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved | loaded)


def refuse(rendezvous: str, rank: int, case: Case, folder: Path) -> tuple[str, bool]:
    worker = build(case, rendezvous, rank)
    before = gathered(worker)
    with pytest.raises(WhetError) as caught:
        worker.state.load(folder)
    after = gathered(worker)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


def save_twice(rendezvous: str, rank: int, case: Case, at_once: Path, meanwhile: Path) -> None:
    """Save once with training stopped, and once during training."""
    worker = build(case, rendezvous, rank)

    def update(step: int) -> None:
        worker.update(micro_batches(case, worker, step), PolicyGradient())

    update(0)
    worker.state.save(at_once)
    worker.state.begin_save(meanwhile)
    for step in range(1, 4):
        update(step)
    worker.state.finish_save()


def exported(case: Case, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """(the model folder that becomes of one step on two ranks, in float32; their weights)."""
    base, run, [shards] = folder / "base", folder / "run", folders(folder, "shards")
    shutil.copytree(case.model, base)
    tiny_tokenizer().save_pretrained(base)
    case = replace(case, model=base, learner={"precision": "float32"})
    _, weights, _ = on_ranks(2, go_on, case, None, shards, range(1))[0]
    store = CheckpointStore(run / "checkpoints")
    asyncio.run(store.save(1, lambda folder: shutil.copytree(shards, folder / "policy") and None, {}))
    lora = {"lora": {"rank": 2, "alpha": 4.0}} if case.lora else {}
    (run / "recipe.yaml").write_text(json.dumps({"model": {"path": str(base), **lora}, "chat_template": None}))
    export(run, folder / "out")
    return folder / "out", weights


def pieces(folder: Path) -> dict[str, torch.Tensor]:
    """By name and place; which rank writes what several have does not matter."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata().get("DCP_SHARDING_INFO", "{}"))
            found |= {f"{name} {places.get(name)}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_same_files(one: Path, other: Path) -> None:
    """Assert that two folders have the same contents, bit for bit."""
    a, b = pieces(one), pieces(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
