"""The model inside a vLLM worker, by the names that Hugging Face gives its weights: loading them anew, and reading back
what its layers compute with. vLLM fuses matrices and on CPUs repacks them into forms that can't be read, so a linear
layer is asked instead: applied to a unit vector it gives a column of its matrix, to the bit."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class VllmModel:
    """Of one worker; there is one worker (no tensor parallelism)."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.model: nn.Module = worker.model_runner.get_model()
        self.dtype: torch.dtype = worker.model_config.dtype
        self._modules = dict(self.model.named_modules(remove_duplicate=False))  # a tied head has a name of its own
        self._loaded: set[str] = set()
        self._last: tuple[nn.Module, list[int], Tensor] | None = None

    # Loading

    def begin(self) -> None:
        """From here to ``finish`` the layers wait for a complete set of weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded, self._last = set(), None
        with self._config():
            initialize_layerwise_reload(self.model)

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Some of the weights. vLLM may keep the tensors until their layer is complete: don't write to them again."""
        with self._config(), torch.device(self._worker.device):
            self._loaded |= set(self.model.load_weights(named))  # type: ignore[operator]

    def finish(self) -> list[str]:
        """Repack the layers. Returns the parameters (vLLM's names) that no weight came for."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._config(), torch.device(self._worker.device):
            finalize_layerwise_reload(self.model, self._worker.model_config)
        self._worker.model_runner.reset_lora_state()
        return sorted({name for name, _ in self.model.named_parameters()} - self._loaded)

    def _config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)

    # Reading back

    @torch.no_grad()
    def columns(self, name: str, columns: list[int]) -> Tensor | None:
        """These columns of a matrix [rows, len(columns)], or a whole vector, as the model computes with them; None for
        what can't be told (experts, for example)."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        path, _, kind = name.rpartition(".")
        found = self._find(path)
        held = getattr(found[0], kind, None) if found else None
        if found is None or held is None:
            return None
        module, first, rows = found
        head = isinstance(module, VocabParallelEmbedding) and path.endswith("lm_head")
        if kind == "weight" and (head or isinstance(module, LinearBase)):
            held = self._product(module, columns)
        elif columns:
            held = held[:, columns]
        return held[first:] if rows is None else held[first : first + rows]

    def _product(self, module: Any, columns: list[int]) -> Tensor:
        """[rows, len(columns)]. A product of one number with 1 and of the others with 0 is exact in every precision."""
        if self._last is not None and self._last[:2] == (module, columns):
            return self._last[2]  # the parts of a fused matrix come one after the other
        width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
        units = torch.zeros(len(columns), int(width), dtype=self.dtype, device=self._worker.device)
        units[torch.arange(len(columns)), columns] = 1
        product: Tensor = module.quant_method.apply(module, units, bias=None)
        self._last = module, columns, product.T
        return product.T

    def _find(self, path: str) -> tuple[nn.Module, int, int | None] | None:
        """(module, first row, rows); of a matrix that is not fused all rows (None)."""
        modules = self._modules
        if path in modules:
            return modules[path], 0, None
        parent, _, part = path.rpartition(".")
        for fused, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            module = modules.get(f"{parent}.{fused}")
            if part in parts and module is not None:
                sizes: list[int] = module.output_partition_sizes
                place = parts.index(part)
                return module, sum(sizes[:place]), sizes[place]
        return None
