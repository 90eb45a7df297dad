"""Tensor parallelism: every matrix, the attention heads and the vocabulary are split over ranks (arXiv 1909.08053).

The model's ``base_model_tp_plan`` defines how each matrix is split. With sequence parallelism each rank keeps, between
the matrices, its part of the tokens (arXiv 2205.05198). LoRA is split too: B of a column-parallel layer, A of a
row-parallel one. Parameters become DTensors; activations between modules stay plain tensors, except for the inputs of
attention and feed-forward. Routers, experts and vision towers are not split. Independent of FSDP.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from whet.base.errors import WhetError
from whet.models.attention.forest import NAME, decoder_of, unwrapped
from whet.models.quantized import QuantizedLinear
from whet.models.shards import Parameters, Vocabulary
from whet.parallel.experts import routed
from whet.parallel.parameters import local
from whet.parallel.quantized import SplitQuantized

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput

_KNOWN = {"colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce"}
_LIKE = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}  # same layers, but no plan, or one without norms
_EXPERTS = re.compile(r"\.experts(\.|$)")
_TOKENS = 1  # the token dimension of hidden states [1, N, H]


class _Replicated(ParallelStyle):
    """Replicates the parameters on every rank; inputs and outputs are DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def spread_matrices(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split ``model`` in place. Raises ``WhetError`` if its architecture or sizes don't allow it."""
    decoder = decoder_of(model)
    plan, uncut = _plan(model, mesh.size()), routed(model)
    stream: Placement = Shard(_TOKENS) if sequence_parallel else Replicate()  # of hidden states between matrices
    styles: dict[str, ParallelStyle] = {}
    takes_hidden: set[str] = set()
    for name, module in decoder.named_modules():
        kind = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if kind == "colwise":
            styles |= _by_columns(name, module, stream)
            takes_hidden.add(name.rpartition(".")[0])
        elif kind == "rowwise":
            styles |= _by_rows(name, module, stream)
        elif kind == "replicated_with_grad_allreduce":  # a norm of each head: the heads are split
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif isinstance(module, nn.Embedding):
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    for name, module in decoder.named_modules():
        if name not in styles and name not in uncut and any(True for _ in module.parameters(recurse=False)):
            if isinstance(module, nn.Linear):
                raise WhetError(f"{type(decoder).__name__}: its tensor-parallel plan does not include {name}")
            if sequence_parallel:  # a norm of hidden states
                styles[name] = SequenceParallel(use_local_output=True)

    output, embeddings = unwrapped(model).get_output_embeddings(), decoder.get_input_embeddings()
    tied = output.weight is embeddings.weight
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, style in styles.items():
        parallelize_module(decoder.get_submodule(name), mesh, style)
    if tied:
        output.weight = embeddings.weight  # parallelize_module has untied them
    else:
        parallelize_module(output, mesh, ColwiseParallel())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])  # SequenceParallel unfreezes parameters
    for name in takes_hidden:
        decoder.get_submodule(name).register_forward_pre_hook(_enter(mesh, stream), with_kwargs=True)
    if sequence_parallel:
        decoder.register_forward_hook(_leave(mesh))


def _plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return the split of each module, by name (layer numbers as ``*``)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    decoder = decoder_of(model)
    config, name = decoder.config, type(decoder).__name__
    planned = CONFIG_MAPPING[_LIKE[config.model_type]] if config.model_type in _LIKE else config
    plan: dict[str, str] = getattr(planned, "base_model_tp_plan", None) or {}
    plan = {key: kind for key, kind in plan.items() if not _EXPERTS.search(key)}  # see whet.parallel.experts
    unknown = sorted(set(plan.values()) - _KNOWN)
    if not plan or unknown or config._attn_implementation != NAME:
        why = f"its plan has {', '.join(unknown)}" if unknown else "transformers has no plan for it"
        raise WhetError(f"{name} can't be split by parallel.tensor: {why}; use parallel.fsdp")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, ranks)) % ranks:
            raise WhetError(f"parallel.tensor = {ranks} does not divide {key} = {heads} of {name}; choose another size")
    return plan


def _by_columns(name: str, module: Any, stream: Placement) -> dict[str, ParallelStyle]:
    """Split a matrix so that every rank computes some of the outputs from all inputs."""
    if not hasattr(module, "base_layer"):
        return {name: SplitQuantized(name, 0, stream) if isinstance(module, QuantizedLinear) else ColwiseParallel()}
    styles = _by_columns(f"{name}.base_layer", module.base_layer, stream)
    for adapter in _adapters(module):
        styles |= {f"{name}.lora_A.{adapter}": _Replicated(), f"{name}.lora_B.{adapter}": ColwiseParallel()}
    return styles | _norms(name, module, True, stream)


def _by_rows(name: str, module: Any, stream: Placement) -> dict[str, ParallelStyle]:
    """Split a matrix so that every rank computes a partial sum of each output from some of the inputs."""
    if not hasattr(module, "base_layer"):
        quantized = isinstance(module, QuantizedLinear)
        return {name: SplitQuantized(name, 1, stream) if quantized else RowwiseParallel(output_layouts=stream)}
    styles = _by_rows(f"{name}.base_layer", module.base_layer, stream)
    for adapter in _adapters(module):
        styles[f"{name}.lora_A.{adapter}"] = RowwiseParallel(output_layouts=stream)
        styles[f"{name}.lora_B.{adapter}"] = _OnStream(stream)
    return styles | _norms(name, module, False, stream)


def _norms(name: str, module: Any, rows: bool, stream: Placement) -> dict[str, ParallelStyle]:
    from whet.parallel.dora import SplitDora

    style = SplitDora(rows, stream)
    return {f"{name}.lora_magnitude_vector.{adapter}": style for adapter in module.lora_magnitude_vector}


_Inputs = tuple[object, ...]


class _OnStream(ParallelStyle):
    """Replicated parameters, applied to hidden states in their layout between matrices."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [self.stream], run_check=False)

        def leave(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def _adapters(module: nn.Module) -> list[str]:
    adapters: Any = module.lora_A
    return list(adapters)


def _enter(
    mesh: DeviceMesh, stream: Placement
) -> Callable[[nn.Module, _Inputs, dict[str, object]], tuple[_Inputs, dict[str, object]]]:
    """Return a hook that gives attention and feed-forward all tokens as a DTensor: then the gradients of their
    matrices' inputs are summed over ranks once, and returned in the original layout."""

    def whole(hidden: Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, [stream], run_check=False).redistribute(placements=[Replicate()])

    def enter(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[_Inputs, dict[str, object]]:
        if inputs:
            return (whole(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": whole(named["hidden_states"])}

    return enter


def _leave(mesh: DeviceMesh) -> "Callable[[nn.Module, object, BaseModelOutput], object]":
    """Return a hook that gathers the decoder's last hidden states: all tokens, on every rank."""

    def leave(_: nn.Module, __: object, output: "BaseModelOutput") -> object:
        spread = DTensor.from_local(output.last_hidden_state, mesh, [Shard(_TOKENS)], run_check=False)
        output.last_hidden_state = spread.redistribute(placements=[Replicate()]).to_local()
        return output

    return leave


class SpreadVocabulary(Vocabulary):
    """The output matrix, split by vocabulary over a one-dimensional mesh, in equal pieces except for the last ones."""

    def __init__(self, mesh: DeviceMesh, words: int) -> None:
        self.group, self.words = mesh.get_group(), words
        self.piece = -(-words // mesh.size())
        self.start = min(self.piece * mesh.get_local_rank(), words)

    def local(self, weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def all_gather(self, logits: Tensor) -> Tensor:
        padded = nn.functional.pad(logits, (0, self.piece - logits.shape[1]), value=float("-inf"))
        parts = [torch.empty_like(padded) for _ in range(self.group.size())]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts, 1)[:, : self.words]


class TowerOnEachRank(Parameters):
    """The parameters of a vision tower, which is whole on each rank of a one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh, tower: Iterable[str], sequence_parallel: bool) -> None:
        """``tower``: the names of its parameters. With ``sequence_parallel`` each rank has computed the gradients from
        a part of the tokens, otherwise from all tokens."""
        self.group, self.tower = mesh.get_group(), frozenset(tower)
        self.copies = 1 if sequence_parallel else mesh.size()

    def sum_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named:
            if name in self.tower and parameter.grad is not None:
                gradient = local(parameter.grad)
                dist.all_reduce(gradient, group=self.group)  # also of equal copies, so that no bit differs afterwards
                gradient /= self.copies
