"""The KV cache of a prompt, for the rows and prompts that continue it."""

from dataclasses import dataclass, field

from torch import Tensor

from whet.core.expert_ids import Ids


@dataclass(slots=True)
class Prefix:
    """The keys and values of one prompt, in consecutive pieces: prompts with a common prefix share its pieces. Never
    changes once filled."""

    length: int
    keys: list[tuple[Tensor, ...]] = field(default_factory=list)  # per layer pieces [kv_heads, tokens, D]
    values: list[tuple[Tensor, ...]] = field(default_factory=list)  # per layer pieces [kv_heads, tokens, Dv]
    experts: Ids | None = None  # [length, layers, k], if recorded

    def first(self, length: int) -> "Prefix":
        """Return the prefix of the first tokens, without copying a piece that is mostly used."""
        experts = None if self.experts is None else self.experts[:length]
        keys, values = ([_first(pieces, length) for pieces in layers] for layers in (self.keys, self.values))
        return Prefix(length, keys, values, experts)


def _first(pieces: tuple[Tensor, ...], length: int) -> tuple[Tensor, ...]:
    kept: list[Tensor] = []
    for piece in pieces:
        if length <= 0 and kept:
            break
        part = piece[:, :length]
        # a view would keep alive much more memory than it needs
        little = 2 * part.nbytes < piece.untyped_storage().nbytes()
        kept.append(part.clone() if little else part)
        length -= part.shape[1]
    return tuple(kept)
