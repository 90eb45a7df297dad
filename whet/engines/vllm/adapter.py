"""A LoRA adapter inside a vLLM worker: made of tensors, not of files, under one id, and read back from what vLLM's
layers multiply with. Every request names that id (``VllmGenerator``).

vLLM scales B by alpha / rank, fills A and B up to the rank that the engine was started with, and stacks those of fused
matrices side by side. Of several ranks, one that has some rows of a matrix (outputs) has those rows of B and all of A;
one that has some columns (inputs) has those columns of A and all of B."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.engines.vllm.model import VllmModel, cut

NUMBER = 1
"""vLLM's id of the adapter. There is no other."""


class VllmAdapter:
    """One refit of the adapter, on one rank. It takes the place of the one before."""

    def __init__(self, model: VllmModel, worker: Any, rank: int, alpha: float) -> None:
        self._model, self._rank, self._alpha = model, rank, alpha
        loras = getattr(worker.model_runner, "lora_manager", None)
        if loras is None:
            raise RefitError("an adapter came to a vLLM engine that was started without LoRA")
        self._manager: Any = loras._adapter_manager
        mapper = getattr(model.model, "hf_to_vllm_mapper", None)
        self._mapper: Any = mapper.get_rename_mapper() if mapper is not None else None
        self._layers = {id(layer.base_layer): layer for layer in self._manager.modules.values()}
        self._expected: list[str] = []
        self._came: dict[str, Tensor] = {}

    # Loading

    def refuses(self, names: list[str]) -> list[str]:
        """Return, of the tensors to come, the modules that vLLM does not apply LoRA to."""
        self._expected = names
        refused = [name for name in names if self._find(name) is None]
        return list(dict.fromkeys(name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in refused))

    def begin(self) -> None:
        self._came = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take some of the tensors. They are copied, for vLLM scales them in place."""
        self._came |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        """Put the adapter in its place. Returns what did not come; then there is none."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager, came = self._manager, self._came
        manager.remove_all_adapters()
        missing = [name for name in self._expected if name not in came]
        if not missing:
            settings = PEFTHelper(r=self._rank, lora_alpha=self._alpha, target_modules=[])
            dtype = manager.lora_config.lora_dtype
            made = LoRAModel.from_lora_tensors(
                NUMBER, came, settings, device="cpu", dtype=dtype, weights_mapper=self._mapper
            )
            manager.add_adapter(made)
            manager.activate_adapter(NUMBER)
        self._came = {}
        return missing

    # Reading back

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this rank's layer is to hold for a tensor, [slot's rank, inputs] or [outputs, slot's rank]; None
        where vLLM may cut or stack it in a way that is not known here."""
        found = self._find(name)
        slot = self._slot(name)
        if found is None or slot is None:
            return None
        layer, place, is_a = found
        part = cut(layer.base_layer, place, tensor, inputs=is_a, outputs=not is_a)
        if part is None:
            return None
        if not is_a:
            part = part.to(slot.dtype) * (self._alpha / self._rank)
        whole = torch.zeros(slot.shape, dtype=slot.dtype, device=part.device)
        if part.shape[0] <= whole.shape[0] and part.shape[1] <= whole.shape[1]:
            whole[: part.shape[0], : part.shape[1]] = part
        return whole

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        """Return what the layer multiplies with, in full."""
        return self._slot(name)

    def _slot(self, name: str) -> Tensor | None:
        """Return where a tensor lies in its layer; all zeros where no adapter is in place."""
        found = self._find(name)
        if found is None:
            return None
        layer, place, is_a = found
        stacked = layer.lora_a_stacked if is_a else layer.lora_b_stacked
        if place is None and len(stacked) > 1:
            return None
        held: Tensor = stacked[place or 0][:, 0]
        numbers = self._manager.lora_index_to_id
        return held[numbers.index(NUMBER)] if NUMBER in numbers else torch.zeros_like(held[0])

    def _find(self, name: str) -> tuple[Any, int | None, bool] | None:
        """Return (vLLM's layer with LoRA, which of its fused matrices, whether it is A)."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            path, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        except ValueError:  # of another kind of adapter
            return None
        found = self._model.find(path)
        layer = self._layers.get(id(found[0])) if found is not None else None
        if found is None or not isinstance(layer, BaseLinearLayerWithLoRA):
            return None
        return layer, found[1], is_a
