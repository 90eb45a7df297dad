"""Layers that are split over ranks learn the same as in one process."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.learner.parts import VOCABULARY, PolicyGradient, assert_close, published, save_model
from tests.parallel.cases import (
    CPU,
    ENOUGH,
    LANGUAGE,
    RECOMPUTED,
    TOP_P,
    Case,
    batch_of,
    build,
    build_errors,
    micro_batches,
    parameter_counts,
    train_all,
)
from tests.parallel.comparing import check, deviations, restricted, worst_error
from tests.parallel.ranks import info_of, on_ranks
from tests.parallel.saving import assert_same_files, folders, load_error, resume, save_twice
from tests.parallel.skipping import assert_skipped, skip
from whet.base.errors import WhetError
from whet.cluster.processes import ProcessCluster
from whet.core.batch import Batch, ModelOutput
from whet.core.packing import pack
from whet.core.types import Distribution
from whet.learner.base import Top
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.worker import LearnerWorker
from whet.models.config import LoraSettings, ModelConfig
from whet.parallel.config import ParallelConfig
from whet.parallel.parameters import full_tensor

SLOW = pytest.mark.slow
LAST_LAYER = {"target_modules": ["layers.1.mlp.up_proj"]}
TWO, INTERLEAVED = {"pipeline": 2}, {"pipeline": 2, "stages_per_rank": 2}

QUICK = {
    "1f1b, tied": ("qwen", TWO, {"distribution": TOP_P}),
    "interleaved, tied": ("qwen of 4", INTERLEAVED, {}),
}
THOROUGH_2 = {
    "1f1b, lora": ("qwen", TWO, {"lora": True}),
    "1f1b, lora at the last stage only": ("qwen", TWO, {"lora": True, "lora_settings": LAST_LAYER}),
    "1f1b": ("llama", TWO, {}),
    "1f1b, entropy, stages of 3 and 2": ("llama of 5", TWO, {"loss": "entropy"}),
    "1f1b, value": ("llama", TWO, {"loss": "value"}),
    "1f1b, value, tied": ("qwen", TWO, {"loss": "value"}),
    "1f1b, value, lora": ("qwen", TWO, {"loss": "value", "lora": True}),
    "1f1b, recomputed": ("qwen", TWO, {"learner": RECOMPUTED}),
    "1f1b, recomputed, lora": ("llama", TWO, {"learner": RECOMPUTED, "lora": True}),
    "1f1b, offload": ("qwen", TWO | {"cpu_offload": True}, {}),
    "1f1b, fewer micro-batches than stages": ("qwen", TWO, {"max_tokens": ENOUGH}),
    "interleaved, lora": ("qwen of 4", INTERLEAVED, {"lora": True}),
    "interleaved, value": ("llama of 5", INTERLEAVED, {"loss": "value"}),
    "interleaved, entropy, recomputed": ("llama of 5", INTERLEAVED, {"loss": "entropy", "learner": RECOMPUTED}),
    "interleaved, one micro-batch": ("qwen of 4", INTERLEAVED, {"max_tokens": ENOUGH}),
}
THOROUGH_4 = {
    f"{kind} and {name}{', lora' if lora else ''}": (model, layout | size, {"lora": lora})
    for name, size in {
        "fsdp": {"fsdp": 2},
        "replicas": {"replicas": 2},
        "tensor": {"tensor": 2},
        "context": {"context": 2},
    }.items()
    for kind, layout, model in (("1f1b", TWO, "qwen"), ("interleaved", INTERLEAVED, "llama of 5"))
    for lora in (False, True)
} | {
    "1f1b over 4": ("qwen of 4", {"pipeline": 4}, {}),
    "1f1b over 4, lora": ("llama of 5", {"pipeline": 4}, {"lora": True}),
    "1f1b and fsdp, an idle shard": ("llama", TWO | {"fsdp": 2}, {"max_tokens": ENOUGH, "groups": 1}),
    "1f1b and tensor, value": ("qwen", TWO | {"tensor": 2}, {"loss": "value"}),
    "1f1b and tensor, no sequence": ("qwen", TWO | {"tensor": 2, "sequence_parallel": False}, {"distribution": TOP_P}),
    "1f1b and tensor, recomputed": ("llama", TWO | {"tensor": 2}, {"learner": RECOMPUTED}),
    "1f1b and fsdp, offload": ("qwen", TWO | {"fsdp": 2, "cpu_offload": True}, {}),
}
FLOAT32 = {
    f"{model}, {name}": (model, layout, {"learner": {"precision": "float32"}})
    for model, name, layout in (("llama", "1f1b", TWO), ("qwen of 4", "interleaved", INTERLEAVED))
}
GEMMA = {"1f1b": ("gemma", TWO, {}), "1f1b, lora": ("gemma", TWO, {"lora": True})}


def test_a_pipeline_of_two_ranks_learns_the_same_as_one(models):
    check(models, QUICK)


@SLOW
def test_a_pipeline_of_two_ranks_learns_the_same_as_one_in_every_setting(models):
    check(models, THOROUGH_2)


@SLOW
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_a_pipeline_multiplies_with_every_other_layout(models, schedule, lora):
    wanted = {name: case for name, case in THOROUGH_4.items() if name.startswith(schedule)}
    check(models, {name: case for name, case in wanted.items() if bool(case[2].get("lora")) is lora})


@SLOW
def test_a_pipeline_learns_nearly_the_same_in_float32(models):
    check(models, FLOAT32, 5e-6, cut=True)
    check(models, GEMMA, 2e-5)


@SLOW
def test_a_pipeline_in_bfloat16_scores_the_same_and_is_as_exact_as_one_process(models):
    narrow = {"precision": "bfloat16"}
    cases = [Case(models["qwen of 4"], layout, learner=narrow) for layout in (TWO, INTERLEAVED)]
    outputs = on_ranks(2, train_all, cases)
    exact, alone = (train_all("", 0, [Case(models["qwen of 4"], learner=how)])[0] for how in ({}, narrow))

    error = worst_error(alone.gradients, exact.gradients)
    assert 0.001 < error < 0.2
    for first, second in zip(*outputs, strict=True):
        assert worst_error(first.gradients | second.gradients, exact.gradients) < 1.5 * error
        for name, column in alone.scored.items():
            assert torch.equal(first.scored[name], column)


def five(rendezvous: str, rank: int, case: Case) -> Any:
    """Return the outputs of five micro-batches, and their gradient: two ranks of two stages need an even number."""
    worker = build(case, rendezvous, rank)
    micro = [micro_batch for step in range(4) for micro_batch in micro_batches(case, worker, step)][:5]
    scored = worker.score(micro, LANGUAGE, Top(4, VOCABULARY - 3))
    total, metrics, logprobs = worker.accumulate(micro, PolicyGradient())
    gradients = {name: full_tensor(p.grad, CPU) for name, p in worker.module.by_name()}
    columns = {f"{i} {name}": column for i, outputs in enumerate(scored) for name, column in outputs.items()}
    columns |= {f"{i} of the update": column for i, column in enumerate(logprobs)}
    return float(total), metrics.result(), columns, gradients


@pytest.mark.slow
def test_any_number_of_micro_batches_is_allowed(models):
    case = Case(models["qwen of 4"], INTERLEAVED)
    loss, metrics, columns, gradients = five("", 0, Case(models["qwen of 4"]))
    for outputs in on_ranks(2, five, case):
        assert outputs[0] == pytest.approx(loss, rel=1e-12)
        assert outputs[1] == metrics  # without the micro-batch that was added
        assert not list(deviations("column", columns, outputs[2], 1e-12))
        assert not list(deviations("gradient", restricted(gradients, outputs[3]), outputs[3], 1e-12))


# Saving, skipping, refusing


LONG = [{}, INTERLEAVED, {"fsdp": 2}, TWO, {}]


@pytest.mark.parametrize(
    ("layouts", "lora"),
    [([{}, TWO, {}], False), pytest.param(LONG, False, marks=SLOW), pytest.param(LONG, True, marks=SLOW)],
    ids=["short", "long", "long, lora"],
)
def test_a_learner_resumes_with_and_without_a_pipeline(models, tmp_path, layouts, lora):
    """Each learner loads the checkpoint of the one before; weights are restored bit for bit."""
    model, places = models["qwen of 4"], folders(tmp_path, *"01234"[: len(layouts)])
    last = len(layouts) - 1
    _, straight, _ = resume("", 0, Case(model, lora=lora), None, None, range(last))
    loaded_and_left: list[list[dict[str, Tensor]]] = []
    for index, layout in enumerate(layouts):
        args = (Case(model, layout, lora=lora), places[index - 1] if index else None, places[index])
        steps = range(index, min(index + 1, last))
        ranks = on_ranks(2, resume, *args, steps) if layout else [resume("", 0, *args, steps)]
        assert {step for _, _, step in ranks} == {min(index + 1, last)}
        loaded_and_left.append([{k: t for rank in ranks for k, t in rank[which].items()} for which in (0, 1)])
    for (_, left), (loaded, _) in pairwise(loaded_and_left):
        assert left.keys() == loaded.keys()
        assert all(torch.equal(left[name], loaded[name]) for name in left)
    assert_close(straight, loaded_and_left[-1][1], 1e-12)
    written = [name for file in places[last - 1].glob("*.safetensors") for name in keys(file)]
    assert len(written) == len(set(written))  # tied embeddings of two stages are written once


def keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


@SLOW
def test_saving_a_pipeline_during_training_writes_the_same(models, tmp_path):
    at_once, meanwhile = folders(tmp_path, "at once", "meanwhile")
    on_ranks(2, save_twice, Case(models["qwen"], TWO), at_once, meanwhile)
    assert_same_files(at_once, meanwhile)


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_stages(models, tmp_path):
    other, damaged = folders(tmp_path, "other", "damaged")
    resume("", 0, Case(models["llama"]), None, other, range(1))
    two = Case(models["qwen"], TWO)
    on_ranks(2, resume, two, None, damaged, range(1))
    sorted(damaged.glob("shard-*"))[1].unlink()
    for folder, words in ((other, "lm_head.weight is not of this model"), (damaged, "is missing")):
        for message, unchanged in on_ranks(2, load_error, two, folder):
            assert words in message
            assert unchanged


def test_all_stages_skip_a_bad_step(models, tmp_path):
    case = Case(models["qwen"], TWO)
    assert_skipped(on_ranks(2, skip, case, tmp_path), case)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001-001"]


def test_every_stage_keeps_only_its_part(models):
    cases = [Case(models[model], TWO) for model in ("llama", "qwen of 4")]
    llama, qwen = zip(*on_ranks(2, parameter_counts, cases), strict=True)
    alone = parameter_counts("", 0, [case.one_rank() for case in cases])
    assert sum(llama) == alone[0]
    assert max(llama) == min(llama) + 16  # the last norm
    assert sum(qwen) == alone[1] + VOCABULARY * 16  # tied embeddings are at both ends


def test_a_model_that_cannot_be_split_into_stages_is_refused_on_every_rank(models, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, **small))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **small))
    cases = [
        Case(save_model(tmp_path / "mamba", mamba), TWO),
        Case(save_model(tmp_path / "gpt2", gpt2), TWO),
        Case(models["llama"], INTERLEAVED),
    ]
    for messages in on_ranks(2, build_errors, cases):
        assert "other than plain attention" in messages[0]
        assert "so it can't be split into stages" in messages[1]
        assert "LlamaModel has 2 layers, too few for 4 stages" in messages[2]


def test_stages_without_a_pipeline_are_refused():
    with pytest.raises(ValueError, match="stages_per_rank needs a pipeline"):
        ParallelConfig(fsdp=2, stages_per_rank=2)


def one_adapter(rendezvous: str, rank: int, model: Path, sizes: ParallelConfig, folder: Path) -> Any:
    """Train two steps with an adapter in the last layer only; save them, or on one rank load them."""
    lora = LoraSettings(rank=2, alpha=4.0, target_modules=["layers.3.mlp.up_proj"])
    config = WorkerConfig(
        model=ModelConfig(path=str(model), lora=lora),
        learner=LearnerConfig(precision="float64", deadline=60.0),
        parallel=sizes,
        optimizer=OptimizerConfig(lr=1e-2),
        steps=10,
    )
    worker = LearnerWorker(config, info_of(rendezvous, rank, sizes.ranks, sizes.ranks_per_shard))
    batches = [pack(batch_of(Case(model, distribution=Distribution()), step), 1, 40)[0] for step in range(2)]
    norms = [worker.update(micro, PolicyGradient()).gradient_norm for micro in batches]
    updated = {name: t.clone() for name, t in published(worker).items()}
    worker.state.save(folder) if sizes.ranks > 1 else worker.state.load(folder)
    return norms, updated, published(worker)


@SLOW
def test_a_stage_without_trained_parameters_works(models, tmp_path):
    outputs = on_ranks(2, one_adapter, models["qwen of 4"], ParallelConfig(**TWO), tmp_path)
    norms, updated, loaded = one_adapter("", 0, models["qwen of 4"], ParallelConfig(), tmp_path)
    for spread, weights, _ in outputs:
        assert spread == pytest.approx(norms, rel=1e-12)
        assert_close(updated, weights, 1e-12)
        assert all(torch.equal(loaded[name], weights[name]) for name in loaded)


class Refusing(PolicyGradient):
    """A loss that raises, on the rank with the head."""

    def __call__(self, output: ModelOutput, batch: Batch) -> Any:
        raise WhetError("this loss wants more than it gets")


@SLOW
def test_an_error_at_one_stage_is_raised_at_once(models):
    async def learn() -> None:
        cluster = ProcessCluster()
        case = Case(models["llama"], distribution=Distribution())
        model, learner = ModelConfig(path=str(case.model)), LearnerConfig(max_tokens=40, deadline=300.0)
        config = WorkerConfig(
            model=model, learner=learner, parallel=ParallelConfig(**TWO), optimizer=OptimizerConfig(), steps=2
        )
        try:
            spread = await WorkerLearner.launch(cluster, config)
            updated = await spread.update(batch_of(case, 0), PolicyGradient())
            assert updated.metrics.result()["learner/micro_batches"] == 4
            begun = time.monotonic()
            with pytest.raises(WhetError, match="this loss wants more than it gets"):
                await spread.update(batch_of(case, 0), Refusing())
            assert time.monotonic() - begun < 60.0
        finally:
            await cluster.close()

    asyncio.run(learn())
