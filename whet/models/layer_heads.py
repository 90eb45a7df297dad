"""The heads of a model's attention, from its config. Layers may differ: in Gemma 4 those with full attention have
larger heads than those with a window, and in some sizes fewer heads of keys."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer."""

    queries: int
    keys: int  # at most as many; several queries then have the same key
    size: int

    @property
    def cached(self) -> int:
        """The numbers in the keys and values of a token."""
        return 2 * self.keys * self.size


def heads_of(text: "PretrainedConfig") -> list[Heads]:
    """Return the heads of each layer of a text model."""
    return _different(text) or [_of_layer(text)] * text.num_hidden_layers


def largest_heads(text: "PretrainedConfig") -> Heads:
    """Return the heads of the layer with the largest ones."""
    return max(_different(text) or [_of_layer(text)], key=lambda heads: (heads.size, heads.keys))


def _different(config: Any) -> list[Heads]:
    """Return the heads of each layer if layers differ."""
    return [_of_layer(layer) for layer in config.per_layer_config] if getattr(config, "is_heterogeneous", False) else []


def _of_layer(config: Any) -> Heads:
    queries = getattr(config, "num_attention_heads", 0) or 1
    keys = getattr(config, "num_key_value_heads", None) or queries
    return Heads(queries, keys, getattr(config, "head_dim", None) or config.hidden_size // queries)
