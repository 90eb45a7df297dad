"""A recipe's plan: its ranks, the memory of each by phase, the size of a refit, and warnings.

Starts nothing and reads no weights: the model's config file is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whet.algorithms.base import OnlineAlgorithm
from whet.base.errors import WhetError
from whet.base.files import format_bytes
from whet.data.rows import PreferenceRows
from whet.diagnose.activations import ModelSize, micro_batch_bytes, model_size
from whet.diagnose.duration import Duration, estimate
from whet.diagnose.layout import Shard, Stage, lay_out, stages
from whet.diagnose.memory import BYTES, CUDA_CONTEXT, Memory, bucket_bytes, generator_memory, learner_memory
from whet.diagnose.work import Work, count_work
from whet.engines.torch.config import TorchGeneratorConfig
from whet.models.loading import load_model_config
from whet.models.moe.routing import experts_missing
from whet.models.quantized import BLOCK
from whet.run.machine import decide
from whet.run.policies import models_of
from whet.weights.config import usual_bucket

if TYPE_CHECKING:
    from whet.parallel.config import ParallelConfig
    from whet.run.recipe import Recipe


@dataclass(slots=True)
class Plan:
    """The output of ``whet plan``. Sizes are in bytes, unless a comment says otherwise."""

    ranks: int  # of each learner
    layout: list[str]  # one line for each dimension that is larger than 1
    models: dict[str, ModelSize]  # by role
    tokens: int  # of the largest micro-batch
    batch: str  # the size of a step, and of all steps, in words
    processes: dict[str, Memory]  # the memory of one process of each kind
    refit: int  # bytes sent by a refit
    refit_tensors: int
    first_refit: int | None = None  # bytes of the first refit, if it is larger
    precision: str = ""  # of learner and generator, with the reason
    quantized: list[str] = field(default_factory=list)  # models with layers in 4 bits, and what that saves, in words
    warnings: list[str] = field(default_factory=list)
    work: Work | None = None  # counts of the data; None: not counted
    time: Duration | None = None  # None: not estimated


def add_work(plan: Plan, recipe: "Recipe") -> None:
    """Count the rows or tasks of a recipe and estimate its time, which takes as long as a run takes to read its data.
    Data that can't be counted are a warning."""
    what = "steps, tokens and time are not counted"
    try:
        recipe, plan.work, samples = count_work(decide(recipe, starts=False)[0])
        what = "the time is not estimated"
        plan.time = estimate(recipe, plan.work, samples)
    except WhetError as error:
        plan.warnings.append(f"{what}: {error}")


def make_plan(recipe: "Recipe", runtime: int, available: int | None = None, *, gpu: bool = False) -> Plan:
    """Plan a recipe. ``runtime``: bytes of a process that has only imported torch and transformers. With ``gpu`` all
    sizes are GPU memory, and the CUDA context counts instead. ``available``: bytes of one device, for the warning that
    a rank doesn't fit."""
    recipe, decision = decide(recipe, starts=False)
    runtime = CUDA_CONTEXT if gpu else runtime
    parallel = recipe.parallel
    lengths, _ = _micro_batches(recipe)
    here = Memory({"runtime": runtime})
    layout = _layout(parallel, recipe.learner.distributed_optimizer)
    plan = Plan(parallel.ranks, layout, {}, sum(lengths), _batch(recipe), {"this process": here}, 0, 0)
    plan.precision = str(decision)
    apart = recipe.cluster.has_processes
    has_roles = len(recipe.algorithm.roles) > 1
    for role in recipe.algorithm.roles:
        for stage, part in _learners(plan, recipe, role, gpu):
            if apart:
                plan.processes[f"each rank of the {role}{stage.name}"] = Memory({"runtime": runtime}).merge(part)
            else:
                here.merge(part, of=role if has_roles else "")
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        _add_generator(plan, recipe, runtime, gpu)
    for name, policy_recipe in models_of(recipe):
        _add_policy(plan, name, make_plan(policy_recipe, runtime, gpu=gpu))
    plan.warnings += _warnings(plan, recipe, available)
    return plan


def _add_policy(plan: Plan, name: str, further: Plan) -> None:
    """Add the plan of a further policy: its learners learn after the others, and all engines sample at the same time
    and stay until the last of them has new weights."""
    here, its = plan.processes["this process"], further.processes.pop("this process")
    del its.always["runtime"]
    for phase in ("generate", "publish"):
        if kinds := its.phases.pop(phase, None):
            here.phases[phase] = here.phases.get(phase, {}) | {f"{k} of the {name}": size for k, size in kinds.items()}
    here.merge(its, of=name)
    plan.processes |= {f"{process} of {name}": memory for process, memory in further.processes.items()}
    plan.models |= {f"{name}'s {role}": size for role, size in further.models.items()}
    plan.quantized += [f"{name}: {text}" for text in further.quantized]
    plan.warnings += [f"policies.{name}: {text}" for text in further.warnings if text not in plan.warnings]
    plan.refit, plan.refit_tensors = plan.refit + further.refit, plan.refit_tensors + further.refit_tensors


def _batch(recipe: "Recipe") -> str:
    """Describe the data of one step, and the length of the run."""
    groups = recipe.data.groups_per_step
    if groups is None and isinstance(recipe.algorithm, OnlineAlgorithm):
        prompts, size = recipe.rollouts.prompts_per_step, recipe.algorithm.group_size
        step = f"{prompts:,} prompts x {size} answers = {prompts * size:,} answers"
    else:
        step = f"{groups or recipe.rollouts.prompts_per_step:,} rows"
    return f"{step}; the run is {recipe.duration}"


def _learners(plan: Plan, recipe: "Recipe", role: str, gpu: bool) -> Iterator[tuple[Stage, Memory]]:
    """Yield the memory of each kind of rank of a role's learner, with ``gpu`` only GPU memory. Adds a warning if the
    model can't be sharded that way."""
    algorithm, learner, parallel = recipe.algorithm, recipe.learner, recipe.parallel
    spec = algorithm.roles[role]
    trains, value, model = spec.loss is not None, spec.head == "value", spec.model_config(recipe.model)
    size = plan.models[role] = model_size(load_model_config(model), model.lora if trains else None)
    lengths, micro_batches = _micro_batches(recipe)
    activations, layer = micro_batch_bytes(model, learner, tuple(lengths)) if trains else (0, 0)
    reads_reference = any(spec.fills.get(column) == "reference_logprobs" for column in algorithm.reads)
    has_reference = reads_reference and not spec.caches_reference and model.lora is None
    for stage in stages(size.layers, parallel, micro_batches):
        try:
            shard, frozen = (
                lay_out(
                    model,
                    parallel,
                    learner.computes_in,
                    train=train,
                    value_head=value,
                    rank=stage.rank,
                    whole=train and learner.distributed_optimizer,
                )
                if exists
                else Shard(0, 0, 0)
                for train, exists in ((trains, True), (False, has_reference))
            )
        except (WhetError, ValueError, RuntimeError, AssertionError) as error:  # of this package, or of torch
            plan.warnings.append(f"this layout will be refused for the {role}: {error}")
            return
        if shard.quantized:
            plan.quantized.append(_saved(role, shard, recipe))
        yield (
            stage,
            learner_memory(
                size,
                learner,
                parallel,
                shard,
                stage=stage,
                activations=activations,
                layer=layer,
                trained_tokens=0 if value else _trained(recipe, lengths),
                hidden_states=micro_batches * sum(lengths) * size.hidden,
                reference=frozen.weights,
                asynchronous=recipe.checkpoints.asynchronous and trains and not gpu,  # the copy is on the CPU
                on_cpu=not gpu,
                moment=1 if recipe.optimizer.moments == "8bit" else None,
                moments=recipe.optimizer.numbers(shard.updated, size.hidden, size.vocabulary),
            ),
        )


def _saved(role: str, shard: Shard, recipe: "Recipe") -> str:
    """Return the memory that a learner's layers in 4 bits take, and what they would take otherwise."""
    frozen = 2 if recipe.learner.computes_in == "bfloat16" else BYTES[recipe.learner.computes_in]
    stored = shard.quantized // 2 + shard.quantized // BLOCK * 4
    return (
        f"the {role}'s linear layers are in 4 bits: {format_bytes(stored)} instead of "
        f"{format_bytes(shard.quantized * frozen)}"
    )


def _add_generator(plan: Plan, recipe: "Recipe", runtime: int, gpu: bool) -> None:
    """Add the engines and the size of a refit to the plan."""
    config, size, weights = recipe.generator, plan.models["policy"], recipe.weights
    number = BYTES[config.dtype]
    bucket = weights.bucket_bytes or usual_bucket(weights.transport, bool(config.gpus))
    if isinstance(config, TorchGeneratorConfig):
        plan.refit, plan.refit_tensors = size.parameters * number, size.tensors
        sampling, prompts = recipe.sampling, recipe.rollouts.prompts_per_step
        answers, prompt = prompts * recipe.online.group_size, sampling.max_prompt_tokens
        if sampling.max_turns > 1:  # from the second turn, each episode has a different prompt
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
        engine.always["adapter"] = 2 * size.adapters * number  # as received, and in the layers
    if recipe.shares_nodes:
        plan.layout.append(
            f"engines {config.replicas}: each takes turns with {config.ranks} ranks of the learner on their devices"
        )
    elif config.on_cluster:
        plan.layout.append(
            f"engines {config.replicas}: each on any node, with {config.ranks} devices that Ray reserves for it, "
            f"{config.replicas * config.ranks} in total, in addition to the learners' devices"
        )
    plan.processes["each engine" if config.ranks == 1 else "each rank of an engine"] = engine
    if weights.transport != "disk":  # the disk transport has its buffers in files
        buffers = {"two buffers of a refit": 2 * bucket_bytes(size, bucket, number)}
        if weights.delta:
            buffers["weights that were sent last"] = (size.adapters if plan.first_refit else size.sent) * number
        senders = [memory for name, memory in plan.processes.items() if name.startswith("each rank of the policy")]
        for memory in senders or [plan.processes["this process"]]:
            memory.always |= buffers
        if weights.transport == "collective" or (config.on_cluster and weights.transport is None):
            engine.always |= buffers


def _micro_batches(recipe: "Recipe") -> tuple[list[int], int]:
    """Return the lengths of the sequences in the largest micro-batch, if every prompt and answer has its maximal
    length, and the number of micro-batches per data-parallel rank."""
    most = recipe.learner.max_tokens
    packed = min(recipe.learner.pack_tokens or most, most)
    if not isinstance(recipe.algorithm, OnlineAlgorithm):
        rows = recipe.rows
        longest = min(most, rows.longest or most)
        pairs = any(isinstance(part, PreferenceRows) for part in rows.parts)
        step = rows.batch_size * longest * (2 if pairs else 1)
    else:
        longest = recipe.sampling.longest
        answer = longest - recipe.sampling.max_prompt_tokens
        step = recipe.rollouts.prompts_per_step * (
            recipe.sampling.max_prompt_tokens + recipe.algorithm.group_size * answer
        )
    each = -(-step // (recipe.parallel.ranks // recipe.parallel.ranks_per_shard))
    return [longest] * max(1, round(min(packed, each) / longest)), -(-each // max(packed, longest))


def _trained(recipe: "Recipe", lengths: list[int]) -> int:
    """Return the most tokens of such a micro-batch that can be trained: it may be made of answers alone."""
    if not isinstance(recipe.algorithm, OnlineAlgorithm):
        return sum(lengths)
    answers = recipe.rollouts.prompts_per_step * recipe.algorithm.group_size
    return min(sum(lengths), answers * (recipe.sampling.longest - recipe.sampling.max_prompt_tokens))


def _layout(parallel: "ParallelConfig", distributed_optimizer: bool) -> list[str]:
    """List the mesh dimensions that are larger than 1, from the slowest to the fastest varying."""
    meanings = {
        "replicas": "copies of the sharded model, each with different data",
        "fsdp": "ranks that each hold a shard of every parameter, with different data",
        "context": "ranks that split the tokens of a micro-batch",
        "pipeline": "ranks that each hold some of the layers",
        "tensor": "ranks that split every matrix",
        "expert": "neighbouring ranks of one copy, which split the experts of every layer",
    }
    if distributed_optimizer:
        meanings["fsdp"] = "ranks with all weights and a share of the optimizer's moments each, with different data"
    sizes: dict[str, int] = dict(parallel)
    return [f"{name} {sizes[name]}: {text}" for name, text in meanings.items() if sizes[name] > 1]


def _crowded(plan: Plan, available: int) -> Iterator[str]:
    """Yield a warning for each engine that doesn't fit on a device together with sleeping learners."""
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
    warnings = list(recipe.warnings())
    for process, memory in plan.processes.items():
        if available and memory.peak() > available:
            warnings.append(
                f"{process} needs about {format_bytes(memory.peak())}, but only {format_bytes(available)} are "
                "available: raise parallel.fsdp, lower learner.pack_tokens, or set "
                "learner.activation_checkpointing=true"
            )
    if available and recipe.devices.placement == "colocated":
        warnings += _crowded(plan, available)
    replays = isinstance(recipe.algorithm, OnlineAlgorithm) and recipe.rollouts.router_replay
    balances = recipe.learner.balance is not None
    if reason := experts_missing(load_model_config(recipe.model), replays, balances):
        warnings.append(reason)
    micro_batches, pipeline = _micro_batches(recipe)[1], recipe.parallel.pipeline
    if micro_batches < pipeline:
        warnings.append(
            f"a step has {micro_batches} micro-batches per data-parallel rank, fewer than the {pipeline} ranks of a "
            "pipeline, so most of them will be idle; lower learner.max_tokens, or use parallel.fsdp"
        )
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        reason = recipe.generator.cannot_run(load_model_config(recipe.model))
        warnings += [reason] if reason is not None else []
        shards = recipe.parallel.ranks // recipe.parallel.ranks_per_shard
        if recipe.rollouts.prompts_per_step < shards:
            warnings.append(
                f"rollouts.prompts_per_step = {recipe.rollouts.prompts_per_step} is less than the {shards} "
                "data-parallel ranks: some will compute only padding"
            )
    return warnings
