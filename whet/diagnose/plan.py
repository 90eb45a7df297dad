"""A recipe's plan: its ranks, what each of them holds in each phase, what a refit moves, and warnings.

Nothing is started and no weight is read: the model's config file is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from whet.algorithms.base import OnlineAlgorithm
from whet.base.errors import WhetError
from whet.base.files import format_bytes
from whet.data.rows import PreferenceRows
from whet.diagnose.activations import ModelSize, activation_bytes, layer_bytes, model_size
from whet.diagnose.layout import Held, Stage, lay_out, stages
from whet.diagnose.memory import BYTES, CUDA_CONTEXT, Memory, bucket_bytes, generator_memory, learner_memory
from whet.engines.torch.config import TorchGeneratorConfig
from whet.models.loading import load_model_config
from whet.models.moe.routing import experts_missing
from whet.run.machine import decide
from whet.weights.config import usual_bucket

if TYPE_CHECKING:
    from whet.learner.config import LearnerConfig
    from whet.models.config import ModelConfig
    from whet.parallel.config import ParallelConfig
    from whet.run.recipe import Recipe

_TRACED = 16384  # tokens; what a longer micro-batch keeps grows in proportion


@dataclass(slots=True)
class Plan:
    """The output of ``whet plan``. Sizes are in bytes, unless a comment says otherwise."""

    ranks: int  # of each learner
    layout: list[str]  # one line for each dimension that is larger than 1
    models: dict[str, ModelSize]  # by role
    tokens: int  # of the fullest micro-batch
    batch: str  # what a step learns from, and what all steps take, in words
    processes: dict[str, Memory]  # the memory of one process of each kind
    refit: int  # moved by one publication of weights
    refit_tensors: int
    first_refit: int | None = None  # moved by the first publication, where it is more
    precision: str = ""  # of learner and generator, and why
    warnings: list[str] = field(default_factory=list)


def make_plan(recipe: "Recipe", runtime: int, available: int | None = None, *, gpu: bool = False) -> Plan:
    """Plan a recipe. ``runtime``: bytes of a process that has only imported torch and transformers; on a ``gpu``, of
    which all sizes are then, those of CUDA. ``available``: bytes of one device, for the warning that a rank doesn't
    fit."""
    recipe, decision = decide(recipe, starts=False)
    runtime = CUDA_CONTEXT if gpu else runtime
    parallel = recipe.parallel
    lengths, _ = _micro_batches(recipe)
    here = Memory({"runtime": runtime})
    plan = Plan(parallel.ranks, _layout(parallel), {}, sum(lengths), _batch(recipe), {"this process": here}, 0, 0)
    plan.precision = str(decision)
    apart = recipe.cluster.has_processes
    several = len(recipe.algorithm.roles) > 1
    for role in recipe.algorithm.roles:
        for stage, part in _learners(plan, recipe, role, gpu):
            if apart:
                plan.processes[f"each rank of the {role}{stage.name}"] = Memory({"runtime": runtime}).merge(part)
            else:
                here.merge(part, of=role if several else "")
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        _add_generator(plan, recipe, runtime, gpu)
    plan.warnings += _warnings(plan, recipe, available)
    return plan


def _batch(recipe: "Recipe") -> str:
    """Say what a step learns from, whatever its micro-batches, and what all steps take."""
    groups, steps = recipe.data.groups_per_step, recipe.steps
    if groups is None and isinstance(recipe.algorithm, OnlineAlgorithm):
        prompts, size = recipe.rollouts.prompts_per_step, recipe.algorithm.group_size
        step, taken, what = f"{prompts:,} prompts x {size} answers = {prompts * size:,} answers", prompts, "prompts"
    else:
        taken, what = groups or recipe.rollouts.prompts_per_step, "rows"
        step = f"{taken:,} rows"
    total = taken * steps
    return f"{step}; {steps:,} steps take {total:,} {what}, which are {total:,} / (number of {what}) epochs"


def _learners(plan: Plan, recipe: "Recipe", role: str, gpu: bool) -> Iterator[tuple[Stage, Memory]]:
    """Yield the memory of each kind of rank of a role's learner, on a ``gpu`` that of the GPU alone. Warns where its
    model can't be laid out so."""
    algorithm, learner, parallel = recipe.algorithm, recipe.learner, recipe.parallel
    own = algorithm.roles[role]
    trains, value, model = own.loss is not None, own.head == "value", own.model_config(recipe.model)
    size = plan.models[role] = model_size(load_model_config(model), model.lora if trains else None)
    lengths, micro_batches = _micro_batches(recipe)
    activations, layer = _activations(model, learner, tuple(lengths)) if trains else (0, 0)
    asked = any(own.fills.get(column) == "reference_logprobs" for column in algorithm.reads)
    beside = asked and not own.caches_reference and model.lora is None
    for stage in stages(size.layers, parallel, micro_batches):
        try:
            held, frozen = (
                lay_out(model, parallel, learner.computes_in, train=train, value_head=value, rank=stage.rank)
                if wanted
                else Held(0, 0)
                for train, wanted in ((trains, True), (False, beside))
            )
        except (WhetError, ValueError, RuntimeError, AssertionError) as error:  # of this package, or of torch
            plan.warnings.append(f"this layout will be refused for the {role}: {error}")
            return
        yield (
            stage,
            learner_memory(
                size,
                learner,
                parallel,
                held,
                stage=stage,
                activations=activations,
                layer=layer,
                hidden_states=micro_batches * sum(lengths) * size.hidden,
                reference=frozen.weights,
                asynchronous=recipe.checkpoints.asynchronous and trains and not gpu,  # the copy is on the CPU
                moment=1 if recipe.optimizer.moments == "8bit" else None,
            ),
        )


def _add_generator(plan: Plan, recipe: "Recipe", runtime: int, gpu: bool) -> None:
    """Add the engines to the plan, and what a refit moves."""
    config, size, weights = recipe.generator, plan.models["policy"], recipe.weights
    number = BYTES[config.dtype]
    bucket = weights.bucket_bytes or usual_bucket(weights.transport, bool(config.gpus))
    if isinstance(config, TorchGeneratorConfig):
        plan.refit, plan.refit_tensors = size.parameters * number, size.tensors
        sampling, prompts = recipe.sampling, recipe.rollouts.prompts_per_step
        answers, prompt = prompts * recipe.online.group_size, sampling.max_prompt_tokens
        if sampling.max_turns > 1:  # from the second one on each episode has a prompt of its own
            prompts, prompt = answers, sampling.longest - min(sampling.max_new_tokens, sampling.longest - prompt)
        plan.processes["this process"].merge(
            generator_memory(
                size,
                config,
                prompts=prompts,
                answers=answers,
                prompt=prompt,
                answer=sampling.longest - prompt,
                bucket=bucket,
                in_turns=recipe.in_turns and not gpu,
            )
        )
        return
    engine = Memory({"runtime": runtime, **config.memory(size.parameters * number)})
    plan.refit, plan.refit_tensors = size.sent * number * config.replicas, size.tensors
    if weights.lora == "adapter":
        plan.first_refit = (size.sent + size.adapters) * number * config.replicas
        plan.refit, plan.refit_tensors = size.adapters * number * config.replicas, 2 * size.adapted
        engine.always["adapter"] = 2 * size.adapters * number  # as it came, and in the layers
    if config.on_cluster:
        plan.layout.append(
            f"engines {config.replicas}: each on any node, with {config.ranks} devices that Ray sets aside for it, "
            f"{config.replicas * config.ranks} in all, beside those of the learners"
        )
    plan.processes["each engine" if config.ranks == 1 else "each rank of an engine"] = engine
    if weights.transport != "disk":  # which has its two in files
        buffers = {"two buffers of a refit": 2 * bucket_bytes(size, bucket, number)}
        senders = [memory for name, memory in plan.processes.items() if name.startswith("each rank of the policy")]
        for memory in senders or [plan.processes["this process"]]:
            memory.always |= buffers
        if weights.transport == "collective" or (config.on_cluster and weights.transport is None):
            engine.always |= buffers


def _micro_batches(recipe: "Recipe") -> tuple[list[int], int]:
    """Return the sequences of the fullest micro-batch, if every prompt and answer is as long as it may be, and the
    number of micro-batches of each shard of the data."""
    most = recipe.learner.max_tokens
    packed = min(recipe.learner.pack_tokens or most, most)
    if not isinstance(recipe.algorithm, OnlineAlgorithm):
        rows = recipe.rows
        longest = min(most, rows.max_tokens or most)
        step = rows.batch_size * longest * (2 if isinstance(rows, PreferenceRows) else 1)
    else:
        longest = recipe.sampling.longest
        answer = longest - recipe.sampling.max_prompt_tokens
        step = recipe.rollouts.prompts_per_step * (
            recipe.sampling.max_prompt_tokens + recipe.algorithm.group_size * answer
        )
    each = -(-step // (recipe.parallel.ranks // recipe.parallel.ranks_per_shard))
    return [longest] * max(1, round(min(packed, each) / longest)), -(-each // max(packed, longest))


@cache
def _activations(model: "ModelConfig", learner: "LearnerConfig", lengths: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes that a micro-batch keeps for its backward pass, of all layers and of one layer."""
    config = load_model_config(model)
    some = list(lengths[: max(1, _TRACED // lengths[0])])
    kept = activation_bytes(config, some, precision=learner.computes_in, checkpointing=learner.activation_checkpointing)
    layer = layer_bytes(config, some, precision=learner.computes_in)
    return kept * sum(lengths) // sum(some), layer * sum(lengths) // sum(some)


def _layout(parallel: "ParallelConfig") -> list[str]:
    """List the dimensions, from the slowest to the fastest varying, with what their ranks share."""
    meanings = {
        "replicas": "copies of the sharded model, with data of their own",
        "fsdp": "ranks that each hold a part of every parameter, with data of their own",
        "context": "ranks that share the tokens of a micro-batch",
        "pipeline": "ranks that each hold some of the layers",
        "tensor": "ranks that share every matrix",
        "expert": "neighbours among the ranks of one copy, which share the experts of every layer",
    }
    return [f"{name} {size}: {text}" for name, text in meanings.items() if (size := getattr(parallel, name)) > 1]


def _crowded(plan: Plan, available: int) -> Iterator[str]:
    """Yield what is too much for a device that learners and an engine share, while the engine samples."""
    engines = [memory for name, memory in plan.processes.items() if "engine" in name]
    ranks = [memory for name, memory in plan.processes.items() if name.startswith("each rank of the ")]
    staying = sum(sum(memory.always.values()) - memory.always.get("optimizer", 0) for memory in ranks)
    for engine in engines:
        if staying + engine.peak() > available:
            yield (
                f"while the engine samples it needs {format_bytes(engine.peak())}, and sleeping learners hold "
                f"{format_bytes(staying)}, but only {format_bytes(available)} are available: raise parallel.fsdp, or "
                "set devices.placement=split"
            )


def _warnings(plan: Plan, recipe: "Recipe", available: int | None) -> list[str]:
    found = list(recipe.warnings())
    for process, memory in plan.processes.items():
        if available and memory.peak() > available:
            found.append(
                f"{process} needs about {format_bytes(memory.peak())}, and {format_bytes(available)} are there: raise "
                "parallel.fsdp, lower learner.pack_tokens, or set learner.activation_checkpointing=true"
            )
    if available and recipe.devices.placement == "colocated":
        found += _crowded(plan, available)
    replays = isinstance(recipe.algorithm, OnlineAlgorithm) and recipe.rollouts.router_replay
    balances = recipe.learner.balance is not None
    if reason := experts_missing(load_model_config(recipe.model), replays, balances):
        found.append(reason)
    micro_batches, pipeline = _micro_batches(recipe)[1], recipe.parallel.pipeline
    if micro_batches < pipeline:
        found.append(
            f"micro-batches of a step for each shard of the data: {micro_batches}, fewer than the {pipeline} ranks of "
            "a pipeline: most of them will be waiting; lower learner.max_tokens, or use parallel.fsdp"
        )
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        reason = recipe.generator.cannot_run(load_model_config(recipe.model))
        found += [reason] if reason is not None else []
        shards = recipe.parallel.ranks // recipe.parallel.ranks_per_shard
        if recipe.rollouts.prompts_per_step < shards:
            found.append(
                f"rollouts.prompts_per_step = {recipe.rollouts.prompts_per_step} is less than the {shards} "
                "data-parallel ranks: some will compute nothing but padding"
            )
    return found
