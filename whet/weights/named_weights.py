"""The current weights of a model under the names of the plain Hugging Face model. LoRA is merged while they are read,
one matrix at a time, or left out, or sent alone; the model itself is never changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.learner.model import LearnerModel
from whet.models.quantized import quantized_layers
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import full_tensors
from whet.parallel.pipeline import Pipeline
from whet.weights.source import Content, NamedTensors, WeightRequest

AT_ONCE = 16 * 2**20
"""Bytes that are gathered in one exchange. The C library caches and reuses memory of this size."""
_LORA = ("lora_A.", "lora_B.", "lora_magnitude_vector.")


@dataclass(slots=True, frozen=True)
class Part:
    """One tensor to send."""

    name: str
    pieces: list[Tensor]  # the tensors it is computed from, possibly sharded
    made: Callable[..., Tensor] = lambda tensor: tensor  # computes it from the whole pieces
    dtype: torch.dtype | None = None  # the pieces are cast to it before they are gathered


def _contents(model: nn.Module, described: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the items of a model's state dict. In place of the stored tensors of a quantized layer, the weights that it
    computes with, made one layer at a time; if they are only ``described``, without values."""
    layers = quantized_layers(model)
    for name, tensor in model.state_dict().items():
        layer = layers.get(name.rpartition(".")[0])
        if layer is None or name.endswith(".bias"):
            yield name, tensor
        elif name.endswith(".packed"):
            name = name.removesuffix("packed") + "weight"
            shape = layer.out_features, layer.in_features
            yield name, layer.weight.new_empty(shape, device="meta") if described else layer.restored()


def _all_weights(model: nn.Module, merged: bool, dtype: torch.dtype | None, described: bool) -> Iterator[Part]:
    """Yield every parameter and persistent buffer, including a tied head. With LoRA, W + scaling B A, or W alone if not
    ``merged``. A tensor that is wider than ``dtype`` and not merged is cast to it before it is gathered, to send less;
    otherwise dtypes don't change."""

    def plain(name: str, tensor: Tensor) -> Part:
        narrower = dtype is not None and dtype.itemsize < tensor.dtype.itemsize
        return Part(name, [tensor], dtype=dtype if narrower else None)

    if not hasattr(model, "peft_config"):
        for name, tensor in _contents(model, described):
            yield plain(name, tensor)
        return
    from peft.tuners.lora import LoraLayer

    from whet.models.moe.expert_lora import ExpertAdapter

    wrapped: Any = model
    base: nn.Module = wrapped.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    tensors = base.state_dict()
    for name, tensor in _contents(base, described):
        owner, _, inside = name.partition(".base_layer.")
        if owner in layers and inside and not _is_of_adapter(inside):
            layer, path, inside = layers[owner], owner, inside.rpartition("base_layer.")[2]
            while isinstance(layer, ExpertAdapter) and layer.parameter_name != inside:  # wrappers are nested
                layer, path = layer.base_layer, f"{path}.base_layer"
            adapted = isinstance(layer, ExpertAdapter) or inside == "weight"
            name = f"{owner}.{inside}"
            yield _merged(name, layer, tensor, path, tensors) if merged and adapted else plain(name, tensor)
        elif not _is_of_adapter(name):
            if "lora_" in name or "modules_to_save" in name:
                raise WhetError(
                    f"{name}: this kind of adapter can't be sent to a generator; use plain LoRA on linear layers"
                )
            yield plain(name, tensor)


def _is_of_adapter(name: str) -> bool:
    return any(f".{part}" in f".{name}" for part in _LORA)


def _merged(name: str, layer: Any, weight: Tensor, path: str, tensors: Mapping[str, Tensor]) -> Part:
    """``tensors`` are the model's, in which ``path`` is the layer's name."""
    from whet.models.moe.expert_lora import ExpertAdapter

    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    magnitudes = [adapter for adapter in adapters if layer.use_dora.get(adapter)]
    pieces = [tensors[f"{path}.{side}.{adapter}.weight"] for adapter in adapters for side in ("lora_A", "lora_B")]
    pieces += [tensors[f"{path}.lora_magnitude_vector.{adapter}.weight"] for adapter in magnitudes]

    def made(weight: Tensor, *sides: Tensor) -> Tensor:
        norms = dict(zip(magnitudes, sides[2 * len(adapters) :], strict=True))
        for number, adapter in enumerate(adapters):
            a, b = sides[2 * number : 2 * number + 2]
            if isinstance(layer, ExpertAdapter):
                delta = layer.added(a, b)
            else:
                delta = (b @ a).T if layer.fan_in_fan_out else b @ a
            weight = weight + delta * layer.scaling[adapter]  # in the wider dtype of the trained tensors
            if adapter in norms:
                weight = _with_row_norms(weight, norms[adapter], inputs_first=layer.fan_in_fan_out)
        return weight

    return Part(name, [weight, *pieces], made)


def _with_row_norms(weight: Tensor, norms: Tensor, *, inputs_first: bool) -> Tensor:
    """Return the matrix with each output's weights scaled to the given norm, as in DoRA. [outputs, inputs] (or, with
    ``inputs_first``, [inputs, outputs]), [outputs] -> the same form"""
    rows = weight.T if inputs_first else weight
    scaled = rows * (norms / torch.linalg.norm(rows, dim=1)).unsqueeze(1)
    return scaled.T if inputs_first else scaled


def _adapter_weights(model: nn.Module) -> Iterator[Part]:
    """Yield LoRA's A [rank, inputs] and B [outputs, rank] of each layer, under the names of PEFT's files."""
    from peft.tuners.lora import LoraLayer

    if not hasattr(model, "peft_config"):
        raise WhetError("weights.lora=adapter sends LoRA's tensors, but this model has none; set model.lora")
    wrapped: Any = model
    base: nn.Module = wrapped.get_base_model()
    tensors = base.state_dict()
    for name, layer in base.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.active_adapters:
                for kind, matrices in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                    if adapter in matrices:
                        tensor = tensors[f"{name}.{kind}.{adapter}.weight"]
                        yield Part(f"base_model.model.{name}.{kind}.weight", [tensor])


@dataclass(slots=True, frozen=True)
class ModelWeights:
    """The detached weights of a model and their description; can be iterated repeatedly.

    ``gather`` returns whole tensors, one after the other, from the parts on this rank. It is called for some tensors at
    a time, when they are needed.
    """

    model: nn.Module
    gather: Callable[[Sequence[Tensor]], Iterable[Tensor]] = lambda tensors: tensors
    content: Content = "merged"
    dtype: torch.dtype | None = None  # the dtype to which they will be cast; wider ones may be cast before
    at_once: int = AT_ONCE  # bytes of whole tensors per ``gather``; a larger tensor is alone

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return (name, dtype, shape) of each tensor; nothing is gathered or merged."""
        descriptions = []
        for part in self._parts(described=True):
            pieces = [torch.empty(p.shape, dtype=part.dtype or p.dtype, device="meta") for p in part.pieces]
            tensor = part.made(*pieces)
            descriptions.append((part.name, tensor.dtype, tensor.shape))
        return descriptions

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each. The tensors may be the model's: copy a tensor that must outlive the next
        step."""
        for parts in _exchanges(self._parts(), self.at_once):
            pieces = iter(self.gather([piece.to(part.dtype or piece.dtype) for part in parts for piece in part.pieces]))
            for part in parts:
                yield part.name, part.made(*islice(pieces, len(part.pieces)))

    def _parts(self, described: bool = False) -> Iterator[Part]:
        if self.content == "adapter":
            return _adapter_weights(self.model)
        return _all_weights(self.model, self.content == "merged", self.dtype, described)


@dataclass(slots=True, frozen=True)
class StagedWeights:
    """The weights of a model whose layers are distributed over the stages of a pipeline."""

    pipeline: Pipeline
    stage: ModelWeights

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return self.pipeline.described(self.stage.described())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.pipeline.gather(self.stage.tensors())


def requested_weights(
    model: LearnerModel, device: torch.device, ranks: Ranks | None, request: WeightRequest
) -> NamedTensors:
    """Return the weights of a request, which the first rank gets, or all ranks if all of them write. With several ranks
    all must iterate together, because tensors are gathered when they are needed."""
    everywhere = request.every_rank or ranks is None or model.pipeline is not None
    weights = ModelWeights(
        model.model,
        lambda tensors: full_tensors(tensors, device, everywhere),
        request.content,
        request.dtype,
        min(request.bucket_bytes or AT_ONCE, AT_ONCE),
    )
    return weights if model.pipeline is None else StagedWeights(model.pipeline, weights)


def _exchanges(parts: Iterable[Part], at_once: int) -> Iterator[list[Part]]:
    """Yield consecutive parts that are gathered in one exchange."""
    some: list[Part] = []
    total = 0
    for part in parts:
        # A sharded tensor counts with its full size.
        size = sum(piece.numel() * (part.dtype or piece.dtype).itemsize for piece in part.pieces)
        if some and total + size > at_once:
            yield some
            some, total = [], 0
        some.append(part)
        total += size
    if some:
        yield some
