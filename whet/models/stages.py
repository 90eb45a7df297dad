"""A decoder split into pipeline stages by its layers: the first stage embeds tokens and images, the last ends with the
norm and head.

Hidden states are passed from one stage to the next, followed by the features of images that later layers add to theirs
(DeepStack, arXiv 2406.04334, of Qwen3-VL). A stage is the model's code over some of its layers: placeholders without
effect replace the other layers, so every parameter keeps its name.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_BETWEEN_LAYERS = {
    "num_kv_shared_layers": "layers that use the keys and values of other layers",
    "hidden_size_per_layer_input": "layers that embed tokens again",  # Gemma 3n, and the small ones of Gemma 4
}


@dataclass(slots=True, frozen=True)
class Stage:
    """Contiguous layers of a decoder."""

    index: int
    layers: range
    first: bool  # embeds tokens and images
    last: bool  # ends with the norm and the head
    deep: int = 0  # the decoder's first layers that add features of images to their results

    @property
    def entering(self) -> int:
        """The number of features per token that the stage gets with the hidden states, for its layers and later
        ones."""
        return 0 if self.first else max(0, self.deep - self.layers.start)

    @property
    def leaving(self) -> int:
        """The number of features per token that the stage passes on with its hidden states."""
        return max(0, self.deep - self.layers.stop)

    def passed_on(self, hidden: Tensor, of_image: Tensor | None, deep: Sequence[Tensor]) -> Tensor:
        """Return ``hidden``, [1, n, H], followed by the features for later stages, [1 + leaving, n, H]. ``deep``: the
        features for each of the first layers, [features, H], of the tokens marked in ``of_image``, [n] bool; nothing if
        no token is an image's."""
        if not self.leaving:
            return hidden
        if of_image is None or not deep:
            return torch.cat([hidden, hidden.new_zeros(self.leaving, *hidden.shape[1:])])
        places, nothing = of_image[None, :, None], torch.zeros_like(hidden)
        later = [nothing.masked_scatter(places, part.to(hidden.dtype)) for part in deep[self.layers.stop :]]
        return torch.cat([hidden, *later])


@dataclass(slots=True)
class StageInput:
    """The input of one stage for one micro-batch."""

    stage: Stage
    received: Tensor | None = None  # [1 + stage.entering, n, H] from the stage before; None at the first one

    @property
    def hidden(self) -> Tensor | None:
        """The hidden states, [1, n, H]."""
        return None if self.received is None else self.received[:1]

    def deep(self, places: Tensor) -> tuple[Tensor, ...]:
        """Return the features of images for each of the decoder's first layers, [features, H], at ``places`` of tokens,
        [features]. For layers of earlier stages they are zeros, since placeholders get them, too."""
        if self.received is None or not self.stage.entering:
            return ()
        features = [row.index_select(0, places) for row in self.received[1:]]
        return (torch.zeros_like(features[0]),) * (self.stage.deep - len(features)) + tuple(features)


class Placeholder(nn.Module):
    """Replaces a layer, the embeddings or the head, without their weights. It keeps the attributes that a decoder reads
    from its layers (their kind of attention)."""

    weight = None

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def layers_of(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the decoder's first list of modules, and the list; an empty list if there is none."""
    lists = ((name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList))
    return next(lists, ("", nn.ModuleList()))


def cut_layers(layers: int, stages: int) -> list[range]:
    """Return each stage's layers: as equal in number as possible, and never more in the last stage, which has the
    head."""
    starts = [-(-index * layers // stages) for index in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def stages_of(decoder: "PreTrainedModel", count: int, deep: int = 0) -> list[Stage]:
    """Return ``count`` stages of a decoder whose first ``deep`` layers add features of images. Raises ``WhetError`` if
    there are fewer layers than stages."""
    layers = len(layers_of(decoder)[1])
    if count > layers:
        raise WhetError(
            f"{type(decoder).__name__} has {layers} layers, too few for {count} stages; lower parallel.pipeline or "
            "parallel.stages_per_rank"
        )
    return [Stage(i, numbers, i == 0, i == count - 1, deep) for i, numbers in enumerate(cut_layers(layers, count))]


def check_stages(model: "PreTrainedModel", count: int, reads_images: bool) -> None:
    """Raise ``WhetError`` if a model can't be split into ``count`` stages: it has too few layers, changes hidden states
    outside of its layers and its last norm, which would happen once per stage, or its layers share more than hidden
    states and features of images. ``model`` is Hugging Face's; without weights only its config and the names of its
    parameters are checked."""
    name, decoder = type(model).__name__, model.get_decoder()
    advice = "so it can't be split into stages; set parallel.pipeline to 1"
    inside = {id(p) for module in (decoder, model.get_output_embeddings()) for p in module.parameters()}
    for more in (parameter for parameter, p in model.named_parameters() if id(p) not in inside and not reads_images):
        raise WhetError(f"{name} has more than a decoder and a head ({more}), {advice}")
    stages_of(decoder, count)
    for key, what in _BETWEEN_LAYERS.items():
        if getattr(decoder.config, key, 0):
            raise WhetError(f"{name} has {what}, {advice}")
    weight = decoder.get_input_embeddings().weight
    if weight.is_meta:
        return
    hidden = torch.linspace(-1, 1, 2 * decoder.config.hidden_size, dtype=weight.dtype).view(1, 2, -1)
    empty = stage_decoder(decoder, Stage(1, range(0), first=False, last=False))
    try:
        with torch.no_grad():
            after = empty(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False).last_hidden_state
    except Exception as error:
        raise WhetError(f"{name} does not run without layers ({error}), {advice}") from error
    if not torch.equal(after, hidden):
        raise WhetError(f"{name} changes hidden states outside of its layers, {advice}")


def deep_features(model: "PreTrainedModel") -> int:
    """Return how many layers, from the first one, add features of images to their results."""
    return len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def drop_other_layers(model: "PreTrainedModel", stages: Collection[Stage]) -> None:
    """Drop from Hugging Face's ``model``, in place, the parameters that none of ``stages`` needs. The last stage keeps
    tied embeddings as its head."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    (_, layers), embeddings = layers_of(decoder), decoder.get_input_embeddings()
    tied, last = head.weight is embeddings.weight, any(stage.last for stage in stages)
    needed = {index for stage in stages for index in stage.layers}
    for index, layer in enumerate(layers):
        if index not in needed:
            layers[index] = Placeholder(layer)
    if not last:
        for name in _after_layers(decoder):
            setattr(decoder, name, nn.Identity())
        _drop(model, head)
    if any(stage.first for stage in stages):
        return
    _drop_tower(model, decoder, head)
    if not (last and tied):
        _drop(decoder, embeddings)


def stage_decoder(decoder: "PreTrainedModel", stage: Stage) -> "PreTrainedModel":
    """Return a decoder that runs one stage, and shares its modules with ``decoder``, which may have several stages."""
    part = copy.copy(decoder)
    name, layers = layers_of(decoder)
    shown = [layer if index in stage.layers else Placeholder(layer) for index, layer in enumerate(layers)]
    part._modules = decoder._modules | {name: nn.ModuleList(shown)}
    if not stage.last:
        part._modules |= {name: nn.Identity() for name in _after_layers(decoder)}
        part._forward_hooks = type(part._forward_hooks)()  # they apply to the decoder's final output
    return part


def _after_layers(decoder: "PreTrainedModel") -> list[str]:
    """Return the names of modules with parameters other than layers and embeddings: the last norm."""
    others = (layers_of(decoder)[1], decoder.get_input_embeddings())
    children = decoder.named_children()
    return [name for name, child in children if child not in others and any(True for _ in child.parameters())]


def _drop_tower(model: nn.Module, decoder: nn.Module, head: nn.Module) -> None:
    """Drop the vision tower: what is neither a part of the decoder or the head, nor around them."""
    for around in [module for module in model.modules() if decoder in module.modules() and module is not decoder]:
        for name, child in list(around.named_children()):
            if child is not head and decoder not in child.modules():
                setattr(around, name, Placeholder(child))
        for name, _ in list(around.named_parameters(recurse=False)):
            setattr(around, name, None)


def _drop(parent: nn.Module, child: nn.Module) -> None:
    name = next(name for name, module in parent.named_modules() if module is child)
    parent.set_submodule(name, Placeholder(child))
