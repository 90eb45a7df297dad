"""A recipe's plan: who the ranks are, what each of them holds in each phase, what a refit moves, and what looks wrong.

Nothing is started and no weight is read: the model's config file is enough.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whet.data.examples import PreferenceRows
from whet.errors import WhetError
from whet.generators.torch_config import TorchGeneratorConfig
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config
from whet.plan.memory import BYTES, Held, Memory, Shares, generator_memory, learner_memory
from whet.plan.model import ModelSize, activation_bytes, layer_bytes, model_size
from whet.plan.stages import stage_sizes

if TYPE_CHECKING:
    from whet.parallel.config import ParallelConfig
    from whet.recipe import Recipe

_TRACED = 16384  # tokens; what a longer micro-batch keeps grows in proportion


@dataclass(slots=True)
class Plan:
    """What ``whet plan`` prints. Bytes, except where said."""

    ranks: int  # of each learner
    layout: list[str]  # one line for each dimension that is larger than 1
    models: dict[str, ModelSize]  # by role
    tokens: int  # of the fullest micro-batch
    processes: dict[str, Memory]  # what one of each kind holds
    refit: int  # that one publication of weights moves
    refit_tensors: int
    first_refit: int | None = None  # that the first one moves, where it is more
    warnings: list[str] = field(default_factory=list)


def make_plan(recipe: "Recipe", runtime: int, available: int | None = None) -> Plan:
    """``runtime``: bytes of a process that has only imported torch and transformers. ``available``: bytes of one
    device, for the warning that a rank doesn't fit."""
    algorithm, parallel = recipe.algorithm, recipe.parallel
    lengths, micro_batches = _micro_batches(recipe)
    here = Memory(always={"runtime": runtime})
    plan = Plan(parallel.ranks, _layout(parallel), {}, sum(lengths), {"this process": here}, 0, 0)
    apart = recipe.cluster.has_processes
    several = len(algorithm.heads) + len(algorithm.frozen) > 1
    traced: dict[str, tuple[int, int]] = {}
    for role in (*algorithm.heads, *algorithm.frozen):
        trains = role in algorithm.heads
        model = algorithm.model_of(role, recipe.model) if trains else algorithm.frozen[role]
        size = plan.models[role] = model_size(load_model_config(model), model.lora if trains else None)
        if trains and model.path not in traced:
            traced[model.path] = _activations(recipe, model, lengths)
        asked = [
            column
            for column in algorithm.needs & algorithm.filled_by.keys()
            if algorithm.filled_by[column] == (role, "reference_logprobs")
        ]
        for stage in stage_sizes(size, parallel, micro_batches):
            part = learner_memory(
                stage.size,
                recipe.learner,
                shares_of(parallel),
                held=_held(plan, recipe, role, model, stage.rank),
                activations=int(traced[model.path][0] * stage.activations) if trains else 0,
                layer=traced[model.path][1] if trains else 0,
                travelling=stage.borders * micro_batches * sum(lengths) * size.hidden,
                trains=trains,
                lora=model.lora is not None and trains,
                reference=bool(asked) and not algorithm.caches_reference,
                saves_behind=recipe.checkpoints.asynchronous,
            )
            if apart:
                plan.processes[f"each rank of the {role}{stage.name}"] = Memory(always={"runtime": runtime}).merge(part)
            else:
                here.merge(part, of=role if several else "")
    if algorithm.samples_per_task:
        _add_generator(plan, recipe, runtime)
    plan.warnings += _warnings(plan, recipe, available)
    return plan


def _held(plan: Plan, recipe: "Recipe", role: str, model: ModelConfig, stage: int) -> Held | None:
    """What each of several ranks holds of a role's parameters at this place of a pipeline; None where it can't be laid
    out so, which is said."""
    from whet.plan.layout import lay_out

    if recipe.parallel.ranks == 1:
        return None
    trains, value = role in recipe.algorithm.heads, recipe.algorithm.heads.get(role) == "value"
    precision = recipe.learner.precision
    try:
        return lay_out(model, recipe.parallel, precision, train=trains, value_head=value, stage=stage).held()
    except (WhetError, ValueError, RuntimeError, AssertionError) as error:  # of this package, or of torch
        words = f"this layout will be refused for the {role}: {error}"
        plan.warnings += [] if words in plan.warnings else [words]
        return None


def shares_of(parallel: "ParallelConfig") -> Shares:
    """How the learner's layout divides one model."""
    split = parallel.fsdp * parallel.context
    return Shares(
        dense=split * parallel.tensor,
        experts=split * parallel.tensor,
        gathered=parallel.ranks > 1,  # also by a single rank of a stage: FSDP makes a copy all the same
        tokens=parallel.context * (parallel.tensor if parallel.sequence_parallel else 1),
        matrices=parallel.tensor,
        expert=parallel.expert,
    )


def _add_generator(plan: Plan, recipe: "Recipe", runtime: int) -> None:
    config, size = recipe.generator, plan.models["policy"]
    plan.refit_tensors = size.tensors
    if isinstance(config, TorchGeneratorConfig):
        held = generator_memory(
            size,
            config,
            prompts=recipe.rollouts.prompts_per_step,
            answers=recipe.rollouts.prompts_per_step * recipe.algorithm.samples_per_task,
            prompt=recipe.sampling.max_prompt_tokens,
            answer=recipe.sampling.max_new_tokens * recipe.sampling.max_turns,
            bucket=int(recipe.weights.bucket_mb * 2**20),
        )
        plan.refit = size.parameters * BYTES[config.dtype]
        plan.processes["this process"].merge(held)
        return
    number = BYTES[config.dtype]
    kinds = {"runtime": runtime, **config.memory(size.parameters * number)}
    plan.refit = size.sent * number * config.replicas
    if recipe.weights.lora == "adapter":
        plan.refit, plan.refit_tensors = size.adapters * number * config.replicas, 2 * size.adapted
        plan.first_refit = (size.sent + size.adapters) * number * config.replicas
        kinds["adapter"] = 2 * size.adapters * number  # as it came, and in the layers
    plan.processes["each engine" if config.ranks == 1 else "each rank of an engine"] = Memory(always=kinds)


def _micro_batches(recipe: "Recipe") -> tuple[list[int], int]:
    """The sequences of the fullest micro-batch, if every prompt and answer is as long as it may be, and how many
    micro-batches each shard of the data has."""
    most = recipe.learner.max_tokens
    if not recipe.algorithm.samples_per_task:
        rows = recipe.rows
        longest = min(most, rows.max_tokens or most)
        step = rows.batch_size * longest * (2 if isinstance(rows, PreferenceRows) else 1)
    else:
        answer = recipe.sampling.max_new_tokens * recipe.sampling.max_turns
        longest = recipe.sampling.max_prompt_tokens + answer
        step = recipe.rollouts.prompts_per_step * (
            recipe.sampling.max_prompt_tokens + recipe.algorithm.samples_per_task * answer
        )
    each = -(-step // (recipe.parallel.ranks // recipe.parallel.ranks_per_shard))
    return [longest] * max(1, round(min(most, each) / longest)), -(-each // most)


def _activations(recipe: "Recipe", model: ModelConfig, lengths: list[int]) -> tuple[int, int]:
    """Of all layers, and of one."""
    some, config, learner = lengths[: max(1, _TRACED // lengths[0])], load_model_config(model), recipe.learner
    kept = activation_bytes(config, some, precision=learner.precision, checkpointing=learner.activation_checkpointing)
    layer = layer_bytes(config, some, precision=learner.precision)
    return kept * sum(lengths) // sum(some), layer * sum(lengths) // sum(some)


def _layout(parallel: "ParallelConfig") -> list[str]:
    """The dimensions from the slowest to the fastest numbered, with what their ranks share."""
    said = {
        "replicas": "copies of the sharded model, with data of their own",
        "fsdp": "ranks that each hold a part of every parameter, with data of their own",
        "context": "ranks that share the tokens of a micro-batch",
        "pipeline": "ranks that each hold some of the layers",
        "tensor": "ranks that share every matrix",
        "expert": "neighbours among the ranks of one copy, which share the experts of every layer",
    }
    return [f"{name} {size}: {said[name]}" for name in said if (size := getattr(parallel, name)) > 1]


def _warnings(plan: Plan, recipe: "Recipe", available: int | None) -> list[str]:
    found = list(recipe.warnings())
    for process, memory in plan.processes.items():
        if available and memory.peak() > available:
            found.append(
                f"{process} needs about {in_words(memory.peak())}, and {in_words(available)} are there: raise "
                "parallel.fsdp, lower learner.max_tokens, or set learner.activation_checkpointing=true"
            )
    micro_batches, pipeline = _micro_batches(recipe)[1], recipe.parallel.pipeline
    if micro_batches < pipeline:
        found.append(
            f"micro-batches of a step for each shard of the data: {micro_batches}, fewer than the {pipeline} ranks of "
            "a pipeline: most of them will be waiting; lower learner.max_tokens, or use parallel.fsdp"
        )
    layers = plan.models["policy"].layers if "policy" in plan.models else 0
    if layers and recipe.parallel.stages > layers:
        found.append(f"the model has {layers} layers, too few for {recipe.parallel.stages} stages of a pipeline")
    if recipe.algorithm.samples_per_task:
        reason = recipe.generator.cannot_run(load_model_config(recipe.model))
        found += [reason] if reason is not None else []
        shards = recipe.parallel.ranks // recipe.parallel.ranks_per_shard
        if recipe.rollouts.prompts_per_step < shards:
            found.append(
                f"rollouts.prompts_per_step = {recipe.rollouts.prompts_per_step} is less than the {shards} "
                "data-parallel ranks: some will compute nothing but padding"
            )
    return found


def in_words(size: float) -> str:
    """Bytes for people.

    >>> in_words(1536 * 1024**2)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    raise AssertionError
