"""A learner's model with its head, as one module: all of it on this rank's device, or this rank's part of it. It
computes a batch's log-probs or values. The only shift between inputs and targets is one gather by ``predictor``, and
the head runs only at trained tokens."""

import warnings
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.base.extras import extra, without
from whet.core.batch import Batch, ModelOutput, Output
from whet.learner.base import Top
from whet.learner.config import Precision
from whet.learner.precision import autocast, bf16_residual_stream, keep_in_bfloat16, use_float8, weight_dtype
from whet.models.attention.choice import choose_attention
from whet.models.attention.forest import forest_hidden, unwrapped
from whet.models.compiled import compile_layers
from whet.models.config import AttentionKernel, AttentionName, ModelConfig
from whet.models.device import placed
from whet.models.head import ValueHead, head_of
from whet.models.image_processor import ImageProcessor
from whet.models.images import embedded, zero_of_tower
from whet.models.loading import load_images, load_model
from whet.models.quantized import quantized_layers
from whet.models.saved_activations import save_fewer_activations
from whet.models.shards import WHOLE, Shards
from whet.models.stages import StageInput
from whet.parallel.mesh import Ranks
from whet.parallel.parallelize import parallelize
from whet.parallel.parameters import local
from whet.parallel.pipeline import Pipeline


class LearnerModel(nn.Module):
    """A module, so that hooks around it (of sharded parameters) cover all of it: the weights of the model's head are
    read in ``forward``, and the head itself is not called."""

    def __init__(
        self,
        model: nn.Module,
        value_head: ValueHead | None,
        precision: Precision,
        images: ImageProcessor | None = None,
    ) -> None:
        super().__init__()
        self.model, self.value_head, self.precision = model, value_head, precision
        self.device = torch.device("cpu")  # the device of its computations
        self.images = images  # of a model that reads images
        self.attention: AttentionKernel = "blocks"
        self.lockstep = False  # other ranks run the layers at the same time
        self.shards: Shards = WHOLE
        self.pipeline: Pipeline | None = None  # set if some of the layers are on other ranks
        self.size = self.trained_size = 0  # number of parameters, and of trained parameters, on all ranks

    def forward(
        self, batch: Batch, outputs: Set[Output], top: Top | None = None, stage_input: StageInput | None = None
    ) -> ModelOutput | Tensor:
        """Return the model's outputs for the batch's N tokens, on its device; every column is 0 where untrained.

        The batch should be on the CPU: its layout is computed there, without waiting for a GPU.

        ``outputs`` adds to the log-probs: ``entropy`` [N], and ``topk`` [N, K], the log-probs of the batch's
        ``topk_ids``. With ``top`` the only outputs are ``topk`` and ``topk_ids``: the ``top.k`` most likely tokens
        (all, if there are fewer), the most likely first. With a value head the only output is the values. Outputs that
        are not requested are None, or log-probs of 0.

        Gradients flow; if no token is trained, zeros flow, so that all ranks of a step take part in the backward pass.
        With ``stage_input`` one stage of a pipeline is run; unless it is the last one, what it passes on is returned,
        [1 + stage.leaving, n, H].
        """
        with autocast(self.precision, self.device):
            inputs, first = None, stage_input is None or stage_input.stage.first
            if self.images is not None and batch.images:
                inputs = embedded(self.model, batch, self.images, self.shards.tokens, stage_input)
            hidden = forest_hidden(
                self.model,
                batch,
                self.shards.tokens,
                stage_input,
                attention=self.attention,
                lockstep=self.lockstep,
                embedded=inputs,
            )
            if self.images is not None and first and torch.is_grad_enabled():
                hidden = hidden + zero_of_tower(self.model).to(hidden.dtype)
            if stage_input is not None and not stage_input.stage.last:
                return hidden
            return self._apply_head(hidden, batch, outputs, top)

    def _apply_head(self, hidden: Tensor, batch: Batch, outputs: Set[Output], top: Top | None) -> ModelOutput:
        """Return the outputs for ``hidden`` [N, H], the last hidden state of every token."""
        device = hidden.device
        chosen = self.shards.tokens.local_slice(batch.trained.nonzero().squeeze(1))
        trained = placed(chosen, device)
        # index_select, because its backward sums the children of one predictor in a fixed order on CPUs.
        picked = hidden.index_select(0, placed(batch.predictor[chosen], device))

        def spread(rows: Tensor) -> Tensor:
            column = rows.new_zeros(len(batch), *rows.shape[1:]).index_copy(0, trained, rows)
            return self.shards.tokens.all_reduce(column)

        if self.value_head is not None:
            values = self.value_head(picked)
            return ModelOutput(values.new_zeros(len(batch)), values=spread(values))
        head = head_of(self.model).local(self.shards.vocabulary)
        if top is not None:
            ids, topk = head.topk_logprobs(picked, top.k, batch.distribution, below=top.below)
            return ModelOutput(topk.new_zeros(len(batch)), topk=spread(topk), topk_ids=spread(ids))
        targets = placed(batch.tokens[chosen].long(), device)
        logprobs, entropy = head.token_logprobs(picked, targets, batch.distribution, with_entropy="entropy" in outputs)
        output = ModelOutput(spread(logprobs), entropy=None if entropy is None else spread(entropy))
        if "topk" in outputs:
            ids = placed(batch.column("topk_ids")[chosen], device)
            output.topk = spread(head.ids_logprobs(picked, ids, batch.distribution))
        return output

    def by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model, by their names, and of the value head; on a pipeline's stage, the
        parameters of that stage."""
        yield from self.model.named_parameters()
        if self.value_head is not None:
            yield from self.value_head.named_parameters(prefix="value_head")

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank, by name, without copies of parameters that belong to another pipeline
        stage."""
        copy = None if self.pipeline is None else self.pipeline.copy
        return ((name, parameter) for name, parameter in self.by_name() if parameter is not copy)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Return all gradients, by parameter; with several ranks, the local parts."""
        return ((name, local(p.grad)) for name, p in self.by_name() if p.grad is not None)

    @property
    def fully_trainable(self) -> bool:
        """True if no parameter is frozen, on any rank."""
        return self.size == self.trained_size

    def measure(self) -> None:
        """Compute ``size`` and ``trained_size``; all ranks must call this together."""
        sizes = [
            (part.numel(), parameter.requires_grad)
            for name, parameter in self.owned_parameters()
            for part in self.shards.parameters.stored(name, parameter.detach()).values()
        ]
        quantized = sum(layer.packed.numel() * 2 for layer in quantized_layers(self.model).values())
        counts = sum(size for size, _ in sizes) + quantized, sum(size for size, trained in sizes if trained)
        self.size, self.trained_size = counts if self.pipeline is None else self.pipeline.sum(counts)


def build_model(
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    train: bool,
    value_head: bool = False,
    seed: int = 0,
    compiled: bool = False,
    recomputed: bool = False,
    attention: AttentionName = "blocks",
    float8: bool = False,
    megatron: bool = False,
    whole: bool = False,
) -> LearnerModel:
    """Build the model on this rank. See ``load_model`` for ``train`` and ``seed``; with several ranks, all must call
    this together. ``recomputed``: the backward pass will compute each layer again. ``whole``: with ``megatron``,
    nothing is sharded over ranks with other data."""
    half = precision == "bfloat16"
    bf16_stream = half and device.type == "cuda"
    build = partial(build_whole, config, precision, train, value_head, seed)
    if megatron:
        return _of_megatron(build, ranks, device, half, whole)
    if ranks is None:
        model = build(torch.device("cpu")).to(device)
    else:
        model, shards = parallelize(build, ranks, bfloat16=half, trains=train)
        model.shards, model.lockstep = shards, True
        if ranks.config.pipeline > 1:
            model.pipeline = Pipeline(model.model, shards.tokens, ranks, bf16_stream)
    model.device = device
    if bf16_stream:
        bf16_residual_stream(model.model)
    spread = model.shards.tokens.spread
    model.attention = choose_attention(attention, unwrapped(model.model), device, half=half, spread=spread)
    model.measure()
    if float8:
        use_float8(model.model, device)
    if compiled:
        compile_layers(model.model, device)
    elif train and not recomputed:
        save_fewer_activations(model.model)
    return model


def _of_megatron(
    build: Callable[[torch.device], LearnerModel], ranks: Ranks | None, device: torch.device, half: bool, whole: bool
) -> LearnerModel:
    """Return the model of Megatron Core's layers; hidden states between stages have the weights' dtype."""
    if half and device.type == "cpu":
        raise WhetError(
            "learner.type=megatron computes in bfloat16 on GPUs only; set learner.precision=float32, or "
            "learner.type=torch"
        )
    with extra("megatron", "learner.type=megatron"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron")  # about optional packages, and old settings
        with without("wandb"):  # it would leave two temporary folders of each rank, which ends by a kill
            from whet.parallel.megatron.build import build_megatron

        model, shards = build_megatron(build, ranks, device, whole)
    model.shards, model.lockstep, model.device = shards, ranks is not None, device
    if ranks is not None and ranks.config.pipeline > 1:
        model.pipeline = Pipeline(model.model, model.shards.tokens, ranks)
    model.measure()
    return model


def build_whole(
    config: ModelConfig, precision: Precision, train: bool, value_head: bool, seed: int, device: torch.device
) -> LearnerModel:
    """Build the whole model, on the CPU with its weights, or on ``meta`` without."""
    dtype = weight_dtype(precision)
    model: Any = load_model(config, dtype=dtype, train=train, seed=seed, empty=device.type == "meta")
    keep_in_bfloat16(model, precision)
    images = None if config.vision is None else load_images(config)
    if not value_head:
        return LearnerModel(model, None, precision, images)
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        output.requires_grad_(False)  # its logits are not used
    head = ValueHead(model.config.get_text_config().hidden_size, seed=seed, device=device)
    return LearnerModel(model, head.to(dtype).requires_grad_(train), precision, images)
