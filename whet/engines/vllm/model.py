"""The model inside a vLLM worker, by Hugging Face's weight names: loading new weights, and reading back the values that
its layers compute with. vLLM fuses matrices and on CPUs repacks them into opaque formats. So a linear layer is probed
instead: applied to a unit vector it gives a column of its matrix, to the bit.

Several ranks share the matrices: a column-parallel one is split by rows (outputs), a row-parallel one by columns
(inputs), embeddings and heads by the vocabulary. Each rank gets whole tensors, vLLM takes its part of them, and that
part is read back.
"""

import inspect
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from whet.engines.vllm.adapter import VllmAdapter

_MATRICES = {"in_proj_qkv": 3}
"""The layers of Hugging Face's models that are more than one of the matrices that vLLM fuses."""


class VllmModel:
    """The model of one worker, which is one rank of the engine."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.model: nn.Module = worker.model_runner.get_model()
        self.dtype: torch.dtype = worker.model_config.dtype
        self.device = torch.device(worker.device)
        self._ranks = int(worker.vllm_config.parallel_config.tensor_parallel_size)
        self._wrapped = _with_lora(self.model)
        self._unwrap()
        self._modules = dict(self.model.named_modules(remove_duplicate=False))  # includes a tied head's name
        self._wrap()
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        self._mapper: Any = None if mapper is None else mapper.get_rename_mapper()  # of Hugging Face's names to vLLM's
        self._fused: dict[str, list[str]] = {}  # layers of vLLM -> layers of Hugging Face's model
        for part in self.model.modules():
            if getattr(part, "is_fused_checkpoint_transposed", False):  # as experts are in files, not in the learner
                part.is_fused_checkpoint_transposed = False
        for part in reversed(list(self.model.modules())):  # some models with images leave it to their decoder
            self._fused |= getattr(part, "packed_modules_mapping", {})
        self._expected: set[str] = set()  # parameters to load; 8-bit layers derive other ones from them
        self._loaded: set[str] = set()
        self._last: tuple[nn.Module, list[int], Tensor] | None = None

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that share the matrices."""
        return int(self._worker.rank)

    @property
    def rounding(self) -> float:
        """See ``RankModel``. An 8-bit layer scales its inputs in the engine's dtype."""
        return 0.0 if self._worker.vllm_config.quant_config is None else 4 * torch.finfo(self.dtype).eps

    # Loading

    def begin(self) -> None:
        """Prepare the layers for a complete set of weights, even after an incomplete one."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._loaded, self._last = set(), None
        self._unwrap()
        with self._config():
            initialize_layerwise_reload(self.model)
        self._expected = {name for name, _ in self.model.named_parameters()}
        for module in self.model.modules():
            waiting = get_layerwise_info(module)
            if waiting.can_load():  # from an incomplete set
                waiting.load_numel = 0
                waiting.loaded_weights.clear()
            method: Any = getattr(module, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # on CPUs vLLM packs experts only when it creates their kernel

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the weights. Their memory may be overwritten once this returns."""
        named = list(named)
        with self._config(), torch.device(self._worker.device):
            self._loaded |= set(self.model.load_weights(named))  # type: ignore[operator]
        self._copy_pending({tensor.untyped_storage().data_ptr() for _, tensor in named})

    def _copy_pending(self, memory: set[int]) -> None:
        """Copy the tensors in ``memory`` that vLLM references until their layer is complete."""
        from torch.utils._pytree import tree_map_only
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        def copy(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor

        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                arguments = {name: value for name, value in call.arguments.items() if name != "param"}
                call.arguments.update(tree_map_only(Tensor, copy, arguments))

    def finish(self) -> list[str]:
        """Repack the layers. Return the parameters (vLLM's names) without a loaded weight."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._config(), self.device:
            finalize_layerwise_reload(self.model, self._worker.model_config)
        self._worker.model_runner.reset_lora_state()
        missing = sorted(self._expected - self._loaded)
        self._wrap()
        return missing

    def adapter(self, rank: int, alpha: float) -> "VllmAdapter":
        """Return LoRA over the weights that were loaded last."""
        from whet.engines.vllm.adapter import VllmAdapter

        return VllmAdapter(self, self._worker, rank, alpha)

    def _unwrap(self) -> None:
        """Replace the LoRA wrappers by the layers inside, so that names are as without LoRA."""
        for parent, name, layer in self._wrapped:
            setattr(parent, name, layer.base_layer)

    def _wrap(self) -> None:
        for parent, name, layer in self._wrapped:
            setattr(parent, name, layer)

    def _config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)

    # Reading back

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return this rank's part of a tensor; None if that is unknown: for experts, and for layers that vLLM splits in
        its own way. Call it between ``begin`` and the tensor's ``load``."""
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        path, _, kind = name.rpartition(".")
        location = self.find(path)
        if location is None or getattr(location[0], kind, None) is None:
            return None
        module: Any = location[0]
        parameter: Tensor = getattr(module, kind)
        if isinstance(module, VocabParallelEmbedding):
            part = module.shard_indices
            return tensor[part.org_vocab_start_index : part.org_vocab_end_index]
        if not isinstance(module, linear.LinearBase):
            return tensor if self._ranks == 1 or parameter.shape == tensor.shape else None
        if module.tp_size > 1 and type(module) is not linear.ReplicatedLinear and not _loads_itself(module, parameter):
            return None
        if tensor.ndim == 2 and isinstance(module.quant_method, Fp8PtpcOnlineLinearMethod):
            tensor = in_8_bits(tensor)
        return cut(module, location[1], tensor, inputs=tensor.ndim == 2)

    @torch.no_grad()
    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        """Return these columns of this rank's part of a matrix [rows, len(columns)], or its part of a vector, as the
        model computes with them; None if that is unknown (for experts, for example)."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        path, _, kind = name.rpartition(".")
        location = self.find(path)
        parameter = getattr(location[0], kind, None) if location else None
        if location is None or parameter is None:
            return None
        if hasattr(location[0], "_cpu_unpacked_conv_weight"):  # on CPUs it computes with a packed copy
            return None
        module, places = location
        head = isinstance(module, VocabParallelEmbedding) and path.endswith("lm_head")
        if columns and kind == "weight" and (head or isinstance(module, LinearBase)):
            parameter = self._product(module, columns)
        elif columns:
            parameter = parameter[:, columns]
        if places is None:
            return parameter
        ends = list(accumulate(module.output_partition_sizes, initial=0))
        return parameter[ends[places.start] : ends[places.stop]]

    def _product(self, module: Any, columns: list[int]) -> Tensor:
        """Return [rows, len(columns)]. One number times 1 plus other numbers times 0 is exact in any precision."""
        if self._last is not None and self._last[:2] == (module, columns):
            return self._last[2]  # the parts of a fused matrix are read one after the other
        names = ("input_size_per_partition", "input_size", "embedding_dim")  # replicated layers have no partition
        width = next(size for name in names if (size := getattr(module, name, None)))
        units = torch.zeros(len(columns), int(width), dtype=self.dtype, device=self.device)
        units[torch.arange(len(columns)), columns] = 1
        product: Tensor = module.quant_method.apply(module, units, bias=None)
        self._last = module, columns, product.T
        return product.T

    def find(self, path: str) -> tuple[Any, range | None] | None:
        """Return (module, indices among its fused matrices, or None for the whole module); None if there is no such
        module."""
        modules = self._modules
        if path not in modules and self._mapper is not None:
            path = self._mapper.map_name(f"{path}.").rstrip(".")
        if path in modules:
            return modules[path], None
        parent, _, part = path.rpartition(".")
        for fused, parts in self._fused.items():
            module = modules.get(f"{parent}.{fused}")
            if part in parts and module is not None:
                first = sum(_MATRICES.get(before, 1) for before in parts[: parts.index(part)])
                return module, range(first, first + _MATRICES.get(part, 1))
        return None


def _loads_itself(module: Any, parameter: Tensor) -> bool:
    """Return whether a parameter is split by its layer's class; a model may have a special loader for it."""
    loader = inspect.unwrap(getattr(parameter, "weight_loader", _loads_itself))
    return getattr(loader, "__self__", None) is module


def _with_lora(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return (parent, name in it, layer) of each layer that vLLM has wrapped for LoRA."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]


def cut(
    module: Any, places: range | None, tensor: Tensor, *, inputs: bool = True, outputs: bool = True
) -> Tensor | None:
    """Return a rank's part of a tensor with a dimension for each of a linear layer's ``inputs`` (the second) and
    ``outputs`` (the first); for fused layers, of the matrices at ``places``. None if the layer's class may split
    differently."""
    from vllm.model_executor.layers import linear

    kind: type = type(module)
    if module.tp_size == 1 or kind is linear.ReplicatedLinear:
        return tensor
    if kind is linear.RowParallelLinear:
        width = int(module.input_size_per_partition)
        return tensor.narrow(1, module.tp_rank * width, width) if inputs else tensor
    if kind in (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear):
        return _rows(module, places, tensor) if outputs else tensor
    return None


def in_8_bits(matrix: Tensor) -> Tensor:
    """Return a matrix [outputs, inputs] rounded as by vLLM, with a scale for each output, in float32."""
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max
    scale = (matrix.abs().amax(1, keepdim=True).float() / most).clamp_min(1 / (512 * most))
    return (matrix / scale).clamp(-most, most).to(kind).float() * scale


def _rows(module: Any, places: range | None, tensor: Tensor) -> Tensor | None:
    """Return a rank's rows of a matrix, or of its bias, that is split by rows; for fused matrices (all of them where
    ``places`` is None) the rows of each, concatenated. None if the sizes don't fit."""
    sizes: list[int] = module.output_partition_sizes  # this rank's rows of each matrix
    rows, whole = [], 0
    for number in range(len(sizes)) if places is None else places:
        # With fewer key-value heads than ranks, several ranks have the same ones.
        copies = getattr(module, "num_kv_head_replicas", 1) if number else 1
        first = whole + module.tp_rank // copies * sizes[number]
        rows.append(tensor[first : first + sizes[number]])
        whole += module.tp_size // copies * sizes[number]
    return torch.cat(rows) if whole == len(tensor) else None
