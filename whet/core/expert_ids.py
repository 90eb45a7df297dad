"""The experts that a generator's routers chose for tokens: text beside each span, numbers beside each token.

Ids are int16, [tokens, layers, k], of the layers that have experts; -1 where the choice is not known. As text they go
wherever plain data goes: into JSON, to another process.
"""

import base64
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from whet.core.types import Span

Ids = NDArray[np.int16]


def written(ids: Ids) -> str:
    """Return ids as text: layers, k, and the numbers in base64."""
    return f"{ids.shape[1]} {ids.shape[2]} {base64.b64encode(np.ascontiguousarray(ids, '<i2').tobytes()).decode()}"


def read(text: str) -> Ids:
    """Return what ``written`` wrote."""
    layers, k, numbers = text.split(" ")
    return np.frombuffer(base64.b64decode(numbers), "<i2").reshape(-1, int(layers), int(k))


def unknown(tokens: int, shape: Sequence[int]) -> Ids:
    return np.full((tokens, *shape), -1, np.int16)


def complete(spans: Iterable[Span], ids: Ids) -> None:
    """Write ``ids``, of all tokens of ``spans`` in order, beside those that have none yet: the first choice, by which
    the next token was sampled, is the one that counts."""
    start = 0
    for span in spans:
        own = ids[start : start + len(span.tokens)]
        start += len(span.tokens)
        before = None if span.experts is None else read(span.experts)
        if before is None:
            span.experts = written(own)
        elif len(before) and bool((before[:, 0, 0] < 0).any()):
            span.experts = written(np.where(before < 0, own, before))


def of_tokens(spans: Iterable[Span]) -> Ids | None:
    """Return the ids of all tokens of the spans, in order; None where no span has any."""
    known = [(len(span.tokens), None if span.experts is None else read(span.experts)) for span in spans]
    shape = next((ids.shape[1:] for _, ids in known if ids is not None), None)
    if shape is None:
        return None
    return np.concatenate([unknown(count, shape) if ids is None else ids for count, ids in known])
