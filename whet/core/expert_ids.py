"""Expert ids: the experts that the generator's routers chose for each token, stored as text with each span.

Ids are int16, [tokens, layers with experts, k]; -1 where the choice is unknown. As text they can be written to JSON and
sent to other processes.
"""

import base64
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from whet.core.types import Span

Ids = NDArray[np.int16]


def encode(ids: Ids) -> str:
    """Return ids as text: layers, k, and the ids in base64."""
    return f"{ids.shape[1]} {ids.shape[2]} {base64.b64encode(np.ascontiguousarray(ids, '<i2').tobytes()).decode()}"


def decode(text: str) -> Ids:
    """Return the ids that ``encode`` wrote."""
    layers, k, numbers = text.split(" ")
    return np.frombuffer(base64.b64decode(numbers), "<i2").reshape(-1, int(layers), int(k))


def unknown(tokens: int, shape: Sequence[int]) -> Ids:
    """Return unknown ids for a number of tokens; ``shape`` is [layers, k]."""
    return np.full((tokens, *shape), -1, np.int16)


def fill_missing(spans: Iterable[Span], ids: Ids) -> None:
    """Write ``ids``, of all tokens of ``spans`` in order, to the tokens whose experts are unknown. Existing ids stay:
    they are the experts with which the next token was sampled."""
    start = 0
    for span in spans:
        new = ids[start : start + len(span.tokens)]
        start += len(span.tokens)
        before = None if span.experts is None else decode(span.experts)
        if before is None:
            span.experts = encode(new)
        elif len(before) and bool((before[:, 0, 0] < 0).any()):
            span.experts = encode(np.where(before < 0, new, before))


def experts_per_token(spans: Iterable[Span]) -> Ids | None:
    """Return the ids of all tokens of the spans, in order; None if no span has any."""
    parts = [(len(span.tokens), None if span.experts is None else decode(span.experts)) for span in spans]
    shape = next((ids.shape[1:] for _, ids in parts if ids is not None), None)
    if shape is None:
        return None
    return np.concatenate([unknown(count, shape) if ids is None else ids for count, ids in parts])
