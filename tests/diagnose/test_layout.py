"""The simulated shards of a layout equal the shards of real ranks."""

import resource
import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from transformers import DeepseekV3Config

from tests.parallel.cases import Case, build
from tests.parallel.conftest import models  # noqa: F401
from tests.parallel.ranks import on_ranks
from whet.base.errors import WhetError
from whet.diagnose.layout import Shard, lay_out, rehearsal
from whet.learner.model import build_whole
from whet.models.config import LoraSettings, ModelConfig
from whet.parallel.config import ParallelConfig
from whet.parallel.parallelize import parallelize
from whet.parallel.parameters import local

LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"fsdp": 4}, {}),
    ("qwen", {"fsdp": 2, "tensor": 2}, {"lora": True}),
    ("qwen", {"replicas": 2, "context": 2}, {"learner": {"precision": "bfloat16"}, "trains": False}),
    ("qwen", {"replicas": 2, "fsdp": 2}, {"loss": "value"}),
    ("moe", {"fsdp": 4}, {}),
    ("moe", {"fsdp": 4, "expert": 2}, {"lora": True}),
    ("moe", {"replicas": 2, "fsdp": 2, "expert": 2}, {"learner": {"precision": "bfloat16"}, "trains": False}),
    ("two experts", {"fsdp": 4, "expert": 2}, {}),
    ("mixtral", {"fsdp": 2, "tensor": 2, "expert": 4}, {}),
    ("mixtral", {"fsdp": 2, "tensor": 2}, {}),
    ("mixtral", {"pipeline": 2, "tensor": 2, "expert": 2}, {}),
    ("moe", {"fsdp": 2, "pipeline": 2, "expert": 2}, {"lora": True}),
    ("qwen", {"replicas": 2, "pipeline": 2}, {}),
]


def held(rendezvous: str, rank: int, cases: list[Case]) -> list[Shard]:
    found = []
    for case in cases:
        worker = build(case, rendezvous, rank)
        parts = list(worker.module.parameters())
        trained = [p for p in parts if p.requires_grad]
        updated = trained
        if case.learner.get("distributed_optimizer"):
            assert worker.optimizer is not None
            updated = [p for group in worker.optimizer.param_groups for p in group["params"]]
        numbers, own = (sum(local(p).numel() for p in some) for some in (trained, updated))
        found.append(Shard(sum(local(p).numel() * p.element_size() for p in parts), numbers, own))
    return found


def laid_out(case: Case, rank: int = 0) -> Shard:
    model = ModelConfig(path=str(case.model), lora=LoraSettings(rank=2, alpha=4.0) if case.lora else None)
    precision = case.learner.get("precision", "float64")
    value = case.loss == "value"
    parallel = ParallelConfig(**case.parallel)
    whole = case.learner.get("distributed_optimizer", False)
    return lay_out(model, parallel, precision, train=case.trains, value_head=value, rank=rank, whole=whole)


@pytest.mark.slow
def test_every_rank_holds_what_its_rehearsal_says(models):  # noqa: F811
    cases = [Case(models[name], parallel, **more) for name, parallel, more in LAYOUTS]
    real = on_ranks(4, held, cases)
    for index, case in enumerate(cases):
        said = [laid_out(case, rank) for rank in range(4)]
        assert said == [answers[index] for answers in real], LAYOUTS[index]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more"), [("qwen", {}), ("moe", {"expert": 2})])
def test_ranks_of_the_distributed_optimizer_share_only_the_updates(models, model, more):  # noqa: F811
    pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")
    learner = {"type": "megatron", "distributed_optimizer": True, "precision": "float32"}
    case = Case(models[model], {"fsdp": 2, "tensor": 2, **more}, learner=learner)
    for rank, [real] in enumerate(on_ranks(4, held, [case])):
        said = laid_out(case, rank)
        assert (said.weights, said.trained) == (real.weights, real.trained)
        assert said.updated == pytest.approx(real.updated, rel=0.05)  # shares begin anywhere in a parameter


def test_parts_add_up_to_the_model_and_the_first_rank_has_most(models):  # noqa: F811
    [whole] = held("", 0, [Case(models["moe"])])
    each = [laid_out(Case(models["moe"], {"fsdp": 6, "expert": 2}), rank) for rank in range(6)]
    assert sum(one.weights for one in each) == whole.weights
    assert sum(one.trained for one in each) == whole.trained
    assert each[0] == max(each, key=lambda one: one.weights) != each[-1]
    assert not dist.is_initialized(), "a rehearsal leaves nothing behind"


def test_invalid_layouts_are_refused(models):  # noqa: F811
    with pytest.raises(WhetError, match="does not divide the 4 experts"):
        laid_out(Case(models["moe"], {"fsdp": 16, "expert": 16}))
    with pytest.raises(WhetError, match="does not divide num_key_value_heads = 2"):
        laid_out(Case(models["llama"], {"tensor": 4}))
    assert not dist.is_initialized()


def test_a_rehearsal_has_no_memory_even_where_parameters_are_offloaded(models):  # noqa: F811
    with rehearsal(ParallelConfig(fsdp=2, cpu_offload=True), 0) as ranks:
        whole = partial(build_whole, ModelConfig(path=str(models["llama"])), "float32", True, False, 0)
        scorer, _ = parallelize(whole, ranks, bfloat16=False, trains=True)
        assert {parameter.device.type for parameter in scorer.parameters()} == {"meta"}


def inside(rendezvous: str, rank: int, case: Case) -> str:
    build(case, rendezvous, rank)
    with pytest.raises(WhetError) as caught:
        laid_out(case)
    return str(caught.value)


def test_a_rank_can_not_rehearse_others(models):  # noqa: F811
    assert all("one of several ranks" in said for said in on_ranks(2, inside, Case(models["llama"], {"fsdp": 2})))


@pytest.mark.slow
def test_671_billion_parameters_over_2048_ranks(tmp_path):
    """From the config file alone, in seconds and in little memory."""
    DeepseekV3Config().save_pretrained(tmp_path)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    parallel = ParallelConfig(fsdp=1024, context=2, expert=64)
    first, last = (
        lay_out(ModelConfig(path=str(tmp_path)), parallel, "bfloat16", train=True, rank=rank) for rank in (0, 2047)
    )
    assert time.process_time() - begun < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert first.weights == 4 * first.trained == pytest.approx(4 * 671.03e9 / 2048, rel=0.01)
    assert first.trained >= last.trained == pytest.approx(671.03e9 / 2048, rel=0.02)
