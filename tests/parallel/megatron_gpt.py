"""Megatron Core's own model and checkpoints, without a part of whet in its layers: what others train with it."""

import multiprocessing
import queue
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUTS: dict[str, str | None] = {
    "default": None,
    "numbered": "non_homogeneous_layers",
    "single": "singleton_local_shards",
}
"""Layouts of checkpoints, and the key of metadata that selects each."""
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


def load_and_save(
    rendezvous: str, rank: int, jobs: list[tuple[Any, Path, dict[str, Path]]]
) -> list[tuple[Tensor, list[str]]]:
    """Load checkpoints into models of tensor 2 (expert 2, if they have experts) by Megatron Core's functions, and save
    them in several of ``LAYOUTS``. ``jobs``: each a Hugging Face config, a checkpoint, and a folder for each layout.
    Return of each the logits of ``TOKENS``, and the keys that the checkpoint lacks."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from whet.models.moe.routing import has_experts
    from whet.parallel.megatron.stand_ins import apply_stand_ins

    dist.init_process_group("gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=2)
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size).triu(1).bool()  # else on a GPU
    moe_utils.te_general_gemm = None  # which it defines only with Transformer Engine
    random.get_cuda_rng_tracker().fork = nullcontext  # nothing is random
    filesystem_async._results_queue = queue.Queue()  # else a server of queues is started
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it writes in a child
    results = []
    for hf, source, outs in jobs:
        experts = has_experts(hf)
        parallel_state.initialize_model_parallel(
            2, expert_model_parallel_size=2 if experts else 1, expert_tensor_parallel_size=1
        )
        apply_stand_ins()
        model = gpt(hf, experts)
        state = {"model": model.sharded_state_dict()}
        loaded, _, absent = dist_checkpointing.load(
            state, str(source), strict=dist_checkpointing.validation.StrictHandling.RETURN_ALL
        )
        model.load_state_dict(loaded["model"])
        for layout, folder in outs.items():
            if rank == 0:
                folder.mkdir(parents=True)
            dist.barrier()
            metadata = {key: True} if (key := LAYOUTS[layout]) else None
            dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, str(folder))
        tokens = torch.tensor(TOKENS)
        with torch.no_grad():
            logits: Tensor = model(tokens, torch.arange(tokens.shape[1])[None], None)
        results.append((logits, sorted(absent)))
        parallel_state.destroy_model_parallel()
    return results


def gpt(hf: Any, experts: bool) -> Any:
    """Return Megatron Core's model for a Hugging Face config, with layers of experts where the config has them."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from whet.parallel.config import ParallelConfig
    from whet.parallel.megatron.settings import transformer_config

    settings = transformer_config(hf, torch.float32, ParallelConfig(tensor=2, expert=2 if experts else 1))
    settings.sequence_parallel, settings.expert_tensor_parallel_size = False, 1  # torch's norms can't be spread
    settings.moe_router_pre_softmax = False  # so the weights of a token's experts sum to 1
    dense = getattr(hf, "mlp_only_layers", None)
    if latent := hf.model_type == "deepseek_v3":
        dense = list(range(hf.first_k_dense_replace))
        settings.qk_layernorm = settings.moe_router_enable_expert_bias = True
        settings.moe_router_score_function, settings.moe_router_dtype = "sigmoid", "fp32"
        settings.moe_router_num_groups, settings.moe_router_group_topk = hf.n_group, hf.topk_group
        settings.moe_router_topk_scaling_factor = hf.routed_scaling_factor
    if dense:
        settings.moe_layer_freq = [int(number not in dense) for number in range(hf.num_hidden_layers)]
        spec: Any = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    else:
        count = settings.num_moe_experts
        spec = get_gpt_layer_local_spec(count, qk_layernorm=settings.qk_layernorm, normalization="RMSNorm")
    for layer in getattr(spec, "layer_specs", []) if latent else []:
        # only Transformer Engine's attention is made for sizes of heads that differ
        layer.submodules.self_attention.submodules.core_attention = without_sizes(DotProductAttention)
    return GPTModel(
        settings,
        spec,
        vocab_size=hf.vocab_size,
        max_sequence_length=64,
        parallel_output=False,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none" if latent else "rope",  # latent attention makes its own
        rotary_base=hf.rope_parameters["rope_theta"],
    ).eval()


def without_sizes(kind: type) -> type:
    """Return Megatron Core's attention as a class that may be given the sizes of keys and values, which are alike."""

    class Attention(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            super().__init__(*args, **named)

    return Attention
