"""A checkpoint can be resumed on other ranks, in any layout of the model before and after."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.learner.parts import assert_close
from tests.parallel.cases import Case, build
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import (
    assert_passes_through_one_rank,
    assert_same_files,
    assert_weights_unchanged,
    exported,
    folders,
    load_error,
    resume,
    save_damaged,
    save_twice,
)
from whet.base.errors import WhetError
from whet.learner.state import load_weights

ONE, TWO, BOTH = {}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}


SLOW = pytest.mark.slow


MEGATRON = {"learner": {"type": "megatron"}}
NEEDED = "needs Megatron Core: pip install 'whet[megatron]'"
CHAINS = {
    "two": [(ONE, {}), (TWO, {}), ({"tensor": 2}, {}), ({"context": 2}, {})],
    "all": [(ONE, {}), (TWO, {}), (BOTH, {}), ({"context": 2}, {})],
    "lora": [(layout, {"lora": True}) for layout in (ONE, TWO, BOTH, {"context": 2})],
    "muon": [(layout, {"optimizer": {"type": "muon"}}) for layout in (ONE, TWO, BOTH, {"context": 2})],
    "adafactor": [(layout, {"optimizer": {"type": "adafactor"}}) for layout in (ONE, TWO, BOTH, {"context": 2})],
    "megatron": [
        (ONE, {}),
        ({"tensor": 2}, MEGATRON),
        ({"context": 2, "tensor": 2}, MEGATRON),
        ({"tensor": 2}, {}),
    ],
}


@pytest.mark.parametrize("chain", ["two", *(pytest.param(name, marks=SLOW) for name in CHAINS if name != "two")])
def test_a_learner_resumes_in_other_layouts(models, tmp_path, chain):
    """Each learner loads the checkpoint of the one before, also of another type. The weights are restored bit for bit,
    and five steps equal the steps of an uninterrupted learner. Two of the learners have two ranks, and one between them
    has four, or in the fast chain two."""
    if chain == "megatron":
        pytest.importorskip("megatron.core", reason=NEEDED)
    first, second, third, fourth = folders(tmp_path, "one", "two", "more", "two again")
    case = [Case(models["qwen"], layout, **more) for layout, more in CHAINS[chain]]
    _, uninterrupted, _ = resume("", 0, case[0], None, None, range(5))

    outputs = [resume("", 0, case[0], None, first, range(2))]
    outputs.append(on_ranks(2, resume, case[1], first, second, range(2, 3))[0])
    outputs.append(on_ranks(case[2].ranks, resume, case[2], second, third, range(3, 4))[0])
    outputs.append(on_ranks(2, resume, case[3], third, fourth, range(4, 5))[0])
    outputs.append(resume("", 0, case[0], fourth, None, range(0)))
    assert_weights_unchanged(outputs)
    assert [step for _, _, step in outputs] == [2, 3, 4, 5, 5]
    assert_close(uninterrupted, outputs[-1][1], 1e-12)

    shards = sorted(path.name for path in third.iterdir())
    assert len([name for name in shards if name.startswith("shard-")]) == case[2].ranks
    assert {Path(name).suffix for name in shards} == {".safetensors", ".json"}  # no pickles, which could run code
    assert load_weights(third).keys() == load_file(first / "model.safetensors").keys()


MIXED = {
    "pipeline and fsdp, tied": ("qwen", {"pipeline": 2, "fsdp": 2}),
    "pipeline and expert": ("mixtral", {"pipeline": 2, "fsdp": 2, "expert": 2}),
    "expert and fsdp": ("moe", {"fsdp": 4, "expert": 2}),
    "expert and replicas": ("moe", {"replicas": 2, "fsdp": 2, "expert": 2}),
    "pipeline and fsdp, dora": ("qwen", {"pipeline": 2, "fsdp": 2}, {"lora": True, "lora_settings": {"dora": True}}),
    "tensor and fsdp, dora": ("llama", {"tensor": 2, "fsdp": 2}, {"lora": True, "lora_settings": {"dora": True}}),
    "pipeline and fsdp, images": ("qwen3_vl", {"pipeline": 2, "fsdp": 2}, {"vision": "trained"}),
    "megatron, tied": ("qwen", {"pipeline": 2, "tensor": 2}, MEGATRON),
    "megatron, experts": ("moe", {"context": 2, "tensor": 2, "expert": 2}, MEGATRON),
    "megatron, images": ("qwen3_vl", {"pipeline": 2, "tensor": 2}, MEGATRON | {"vision": "trained"}),
    "megatron, latent attention": ("one-sided", {"fsdp": 2, "tensor": 2, "expert": 2}, MEGATRON),
}


@SLOW
@pytest.mark.parametrize("name", MIXED)
def test_a_checkpoint_of_four_ranks_passes_through_one_rank_unchanged(models, tmp_path, name):
    model, layout, *more = MIXED[name]
    if "megatron" in name:
        pytest.importorskip("megatron.core", reason=NEEDED)
    assert_passes_through_one_rank(Case(models[model], layout, **dict(*more)), tmp_path)


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(models, tmp_path):
    """Another model, and a missing shard: an error on every rank, and unchanged weights."""
    other, whole, damaged = folders(tmp_path, "other", "whole", "damaged")
    resume("", 0, Case(models["llama"]), None, other, range(1))
    two = Case(models["qwen"], TWO)
    on_ranks(2, resume, two, None, whole, range(1))
    shutil.copytree(whole, damaged, dirs_exist_ok=True)
    sorted(damaged.glob("shard-*"))[0].unlink()
    for folder, words in ((other, "lm_head.weight is not of this model"), (damaged, "is incomplete")):
        for message, unchanged in on_ranks(2, load_error, two, folder):
            assert words in message
            assert unchanged


def test_a_weight_that_is_not_finite_on_one_rank_is_saved_by_none(models, tmp_path):
    case = Case(models["qwen"], TWO)
    for errors in on_ranks(2, save_damaged, case, tmp_path):
        assert all("after optimizer step 0 the weights have NaN or infinite numbers" in error for error in errors)
    assert not any(tmp_path.iterdir())


def test_files_of_several_ranks_are_exported_to_one_model_folder(models, tmp_path):
    from transformers import AutoModelForCausalLM

    out, weights = exported(Case(models["qwen"], TWO, lora=True), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(out).state_dict()
    name = "model.layers.1.mlp.up_proj"
    wrapped = f"base_model.model.{name}"
    a, b = (weights[f"{wrapped}.lora_{which}.default.weight"] for which in "AB")
    torch.testing.assert_close(plain[f"{name}.weight"], weights[f"{wrapped}.base_layer.weight"] + 2.0 * b @ a)


@pytest.mark.parametrize("layout", [ONE, TWO, pytest.param(BOTH, marks=SLOW)], ids=["one", "two", "four"])
def test_saving_during_training_writes_the_same(models, tmp_path, layout):
    at_once, meanwhile = folders(tmp_path, "at once", "meanwhile")
    case = Case(models["qwen"], layout)
    if layout:
        on_ranks(case.ranks, save_twice, case, at_once, meanwhile)
    else:
        save_twice("", 0, case, at_once, meanwhile)
    assert_same_files(at_once, meanwhile)
    assert (at_once / "learner.json").read_text() == (meanwhile / "learner.json").read_text()


def fail_to_save(rendezvous: str, rank: int, case: Case, folder: Path) -> str:
    worker = build(case, rendezvous, rank)
    if rank == 1:  # a disk that is full only on this rank
        torch.distributed.checkpoint.FileSystemWriter._write_data = _no_space
    with pytest.raises(WhetError) as caught:
        worker.state.save(folder)
    worker.state.begin_save(folder)
    with pytest.raises(WhetError) as later:
        worker.state.finish_save()
    return f"{caught.value} / {later.value}"


def save_into_a_missing_folder(rendezvous: str, rank: int, case: Case, folder: Path) -> list[str]:
    worker = build(case, rendezvous, rank)
    messages = []
    for save in (worker.state.save, worker.state.begin_save):
        with pytest.raises(WhetError) as caught:
            save(folder / f"of rank {rank}" if rank else folder)  # as on a node without access to the run folder
        messages.append(str(caught.value))
    return messages


def test_a_folder_that_one_rank_cannot_access_is_an_error_on_all_ranks_and_not_created(models, tmp_path):
    messages = on_ranks(2, save_into_a_missing_folder, Case(models["llama"], TWO), tmp_path)
    assert all(
        "doesn't exist on" in message and "visible on all nodes" in message for rank in messages for message in rank
    )
    assert list(tmp_path.iterdir()) == []


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_when_one_rank_cannot_write_all_ranks_fail(models, tmp_path):
    messages = on_ranks(2, fail_to_save, Case(models["llama"], TWO), tmp_path)
    assert all(message.count("rank 1: OSError: [Errno 28] No space left") == 2 for message in messages)
    assert not (tmp_path / "learner.json").exists()


def test_the_facts_have_the_number_of_steps(models, tmp_path):
    on_ranks(2, resume, Case(models["llama"], TWO), None, tmp_path, range(2))
    assert json.loads((tmp_path / "learner.json").read_text())["step"] == 2
