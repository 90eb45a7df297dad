"""A LoRA adapter inside a vLLM worker: created from tensors instead of files, under a fixed id, and read back from the
tensors that vLLM's layers multiply with. Every request names that id (``VllmGenerator``).

vLLM scales B by alpha / rank, pads A and B to the rank that the engine was started with, and stacks the adapters of
fused matrices. With several ranks, a rank with some rows of a matrix (outputs) has the same rows of B and all of A; a
rank with some columns (inputs) has the same columns of A and all of B.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.engines.vllm.model import VllmModel, cut

NUMBER = 1
"""vLLM's id of the adapter that is trained; frozen ones have the next numbers."""


class VllmAdapter:
    """One refit of the adapter, on one rank. It replaces the adapter before."""

    def __init__(self, model: VllmModel, worker: Any, rank: int, alpha: float) -> None:
        self._model, self._rank, self._alpha = model, rank, alpha
        loras = getattr(worker.model_runner, "lora_manager", None)
        if loras is None:
            raise RefitError("an adapter was sent to a vLLM engine that was started without LoRA")
        self._manager: Any = loras._adapter_manager
        mapper = getattr(model.model, "hf_to_vllm_mapper", None)
        self._mapper: Any = mapper.get_rename_mapper() if mapper is not None else None
        self._layers = {id(layer.base_layer): layer for layer in self._manager.modules.values()}
        self._expected: list[str] = []
        self._loaded: dict[str, Tensor] = {}

    # Loading

    def refuses(self, names: list[str]) -> list[str]:
        """Return the modules of the expected tensors to which vLLM does not apply LoRA."""
        self._expected = names
        refused = [name for name in names if self._find(name) is None]
        return list(dict.fromkeys(name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in refused))

    def begin(self) -> None:
        self._loaded = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the tensors. They are copied, because vLLM scales them in place."""
        self._loaded |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        """Activate the adapter. Return the missing tensors; if there are any, no adapter is active."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager, loaded = self._manager, self._loaded
        manager.remove_adapter(NUMBER)  # frozen ones stay
        missing = [name for name in self._expected if name not in loaded]
        if not missing:
            settings = PEFTHelper(r=self._rank, lora_alpha=self._alpha, target_modules=[])
            dtype = manager.lora_config.lora_dtype
            made = LoRAModel.from_lora_tensors(
                NUMBER, loaded, settings, device="cpu", dtype=dtype, weights_mapper=self._mapper
            )
            manager.add_adapter(made)
            manager.activate_adapter(NUMBER)
        self._loaded = {}
        return missing

    # Reading back

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the expected contents of this rank's layer for a tensor, [slot's rank, inputs] or [outputs, slot's
        rank]; None if vLLM may split or stack it in an unknown way."""
        location = self._find(name)
        slot = self._slot(name)
        if location is None or slot is None:
            return None
        layer, places, is_a = location
        part = cut(layer.base_layer, places, tensor, inputs=is_a, outputs=not is_a)
        if part is None:
            return None
        if not is_a:
            part = part.to(slot.dtype) * (self._alpha / self._rank)
        whole = torch.zeros(slot.shape, dtype=slot.dtype, device=part.device)
        if part.shape[0] <= whole.shape[0] and part.shape[1] <= whole.shape[1]:
            whole[: part.shape[0], : part.shape[1]] = part
        return whole

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        """Return the tensor that the layer multiplies with, in full."""
        return self._slot(name)

    def _slot(self, name: str) -> Tensor | None:
        """Return a tensor's memory in its layer; all zeros if no adapter is active."""
        location = self._find(name)
        if location is None:
            return None
        layer, places, is_a = location
        stacked = layer.lora_a_stacked if is_a else layer.lora_b_stacked
        places = places or range(len(stacked))
        if len(places) > 1:
            return None
        slots: Tensor = stacked[places.start][:, 0]
        numbers = self._manager.lora_index_to_id
        return slots[numbers.index(NUMBER)] if NUMBER in numbers else torch.zeros_like(slots[0])

    def _find(self, name: str) -> tuple[Any, range | None, bool] | None:
        """Return (vLLM's layer with LoRA, the indices among its fused matrices, True for A)."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            path, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        except ValueError:  # raised for other kinds of adapters
            return None
        location = self._model.find(path)
        layer = self._layers.get(id(location[0])) if location is not None else None
        if location is None or not isinstance(layer, BaseLinearLayerWithLoRA):
            return None
        return layer, location[1], is_a
