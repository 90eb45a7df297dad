"""Attention of vLLM on CPUs for models in which the tokens of an image attend to all of it (Gemma 3 and 4). vLLM's
backend for CPUs has a causal mask only, and ignores which tokens belong to images. Here it computes these tokens a
second time, without a mask: as another sequence, which ends with the image, in the same cache.

    keys      t t I I I I t t            t text, I image
    query I   1 1 1 1 1 1 0 0            the sequence of the second pass has 6 tokens, of which 4 are queries
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import WhetError


@dataclass(slots=True, frozen=True)
class ImageQueries:
    """The tokens of images among the queries of a step, as sequences of vLLM's kernel."""

    rows: Tensor  # [n] of the queries
    metadata: Any  # for the kernel: without a mask


def install() -> None:
    """Let vLLM's backend for CPUs attend to whole images. More than one call is fine."""
    from vllm.v1.attention.backends import cpu_attn

    backend: Any = cpu_attn.CPUAttentionBackend
    builder: Any = cpu_attn.CPUAttentionMetadataBuilder
    attention: Any = cpu_attn.CPUAttentionBackendImpl
    if backend.supports_mm_prefix():
        return
    plain_build, plain_forward = builder.build, attention.forward

    def build(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        metadata: Any = plain_build(self, common_prefix_len, common, fast_build)
        metadata.mm_prefix_range = _queries(self, metadata, common)  # vLLM clears it in layers without a window
        return metadata

    def forward(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Tensor,
        **more: Any,
    ) -> Tensor:  # fmt: skip
        plain_forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **more)
        images: ImageQueries | None = getattr(attn_metadata, "mm_prefix_range", None)
        if images is not None:
            again = torch.empty_like(output[images.rows])
            plain_forward(self, layer, query[images.rows], key, value, kv_cache, images.metadata, again, **more)
            output[images.rows] = again
        return output

    backend.supports_mm_prefix = classmethod(lambda _: True)
    builder.build, attention.forward = build, forward


def _queries(builder: Any, metadata: Any, common: Any) -> ImageQueries | None:
    """Return the tokens of images among the queries of a step, if there are any. Raises ``WhetError`` if only a part of
    an image is computed in this step."""
    from vllm import _custom_ops, envs

    starts, ends = common.query_start_loc.tolist(), common.seq_lens.tolist()
    rows, lengths, counts, sequences = list[int](), list[int](), list[int](), list[int]()
    for index, ranges in (common.mm_req_doc_ranges or {}).items():
        computed = ends[index] - (starts[index + 1] - starts[index])  # tokens of earlier steps
        for first, last in ranges:
            if last < computed or first >= ends[index]:
                continue
            if last >= ends[index]:
                raise WhetError(
                    "a step of vLLM computes a part of an image, whose tokens attend to all of it; start it with "
                    "--no-enable-chunked-prefill"
                )
            begin = max(first, computed)
            rows += range(starts[index] + begin - computed, starts[index] + last + 1 - computed)
            lengths.append(last + 1)
            counts.append(last + 1 - begin)
            sequences.append(index)
    if not rows:
        return None
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    scheduled = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=seq_lens,
        dtype=builder.dtype,
        query_start_loc=bounds,
        causal=False,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    kind: Any = type(metadata)
    unmasked = kind(
        num_actual_tokens=len(rows),
        max_query_len=max(counts),
        query_start_loc=bounds,
        max_seq_len=max(lengths),
        seq_lens=seq_lens,
        block_table=metadata.block_table[sequences].contiguous(),
        slot_mapping=metadata.slot_mapping,
        scheduler_metadata=scheduled,
        causal=False,
    )
    return ImageQueries(torch.tensor(rows), unmasked)
