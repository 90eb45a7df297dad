"""Starts a vLLM engine: its settings, and the environment that its processes are born with."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.cluster.cores import bound, cores
from whet.generators.vllm_config import Adapters, VllmGeneratorConfig, slot_rank
from whet.generators.vllm_guard import MARK

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER = "whet.generators.vllm_worker.VllmWorker"
_ENVIRONMENT = threading.Lock()  # it belongs to the whole process


def import_vllm(config: VllmGeneratorConfig, mark: str) -> None:
    """A call of its own, before ``start_engine``: while it is imported, vLLM keeps an exception whose traceback holds
    the frames of whoever imported it, and what these hold, for ever."""
    with _environment(config, mark):
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # noqa: F401


def start_engine(
    config: VllmGeneratorConfig,
    folder: Path,
    mark: str,
    own: Sequence[int] | None = None,
    sleeps: bool = False,
    adapters: Adapters | None = None,
) -> "AsyncLLM":
    """An engine for the model whose config and tokenizer are in ``folder``, with random weights; its processes
    bear ``mark`` and are bound to the cores ``own``. ``sleeps``: it can free a GPU's memory; ``adapters``: it applies
    LoRA. Takes 10 to 40 seconds; raises whatever vLLM raises."""
    with _environment(config, mark, own), bound(own):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=not (folder / "tokenizer_config.json").exists(),
            load_format="dummy",  # weights come from the learner
            dtype=config.dtype,
            max_model_len=config.max_context,
            max_num_seqs=config.max_batch,
            max_num_batched_tokens=max(config.prefill_tokens, config.max_batch),
            tensor_parallel_size=config.tensor,
            kv_cache_memory_bytes=int(config.cache_gib * 2**30 / config.tensor),  # of each rank
            enforce_eager=not config.compile,
            logprobs_mode="processed_logprobs",  # of what is sampled from: temperature and filters applied
            generation_config="vllm",  # no sampling defaults from the model's files
            worker_extension_cls=_WORKER,
            disable_log_stats=True,
            enable_sleep_mode=sleeps,
            **_lora(adapters),
        )
        return AsyncLLM.from_engine_args(settings)


def _lora(adapters: Adapters | None) -> dict[str, Any]:
    """Settings for one adapter at a time. Other modules stay as they are: wrapping them costs time and memory."""
    if adapters is None:
        return {}
    room = slot_rank(adapters.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": list(adapters.modules)}


@contextmanager
def _environment(config: VllmGeneratorConfig, mark: str, own: Sequence[int] | None = None) -> Iterator[None]:
    """Children inherit it; this process goes back to its own."""
    wanted = {
        MARK: mark,
        "SPT_NOENV": "1",  # vLLM gives its processes titles, which would overwrite the mark
        "OMP_NUM_THREADS": str(max(1, (config.threads or len(own or ()) or cores()) // config.tensor)),  # of each rank
        "OMP_WAIT_POLICY": "PASSIVE",  # the learner computes beside the engine's idle threads
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else one core is kept free
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_deadline)),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",  # nothing listens beyond this machine
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if config.devices is not None:
        wanted["CUDA_VISIBLE_DEVICES"] = config.devices
        if torch.cuda.is_available():
            torch.cuda.init()  # which GPUs this process itself sees is settled before the variable changes
    if not config.compile:
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # else the sampler compiles a helper at its first token: half a minute
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
