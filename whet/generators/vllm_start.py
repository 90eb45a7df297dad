"""Starts a vLLM engine: its settings, and the environment that its processes are born with."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.generators.config import Adapter, Deployment
from whet.generators.vllm_config import LORA_RANKS, VllmGeneratorConfig
from whet.generators.vllm_guard import MARK
from whet.processes.cores import bound, cores

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER = "whet.generators.vllm_worker.VllmWorker"
_ENVIRONMENT = threading.Lock()  # it belongs to the whole process


def import_vllm(config: VllmGeneratorConfig, mark: str, deployment: Deployment) -> None:
    """A call of its own, before ``start_engine``: while it is imported, vLLM keeps an exception whose traceback holds
    the frames of whoever imported it, and what these hold, for ever."""
    with _environment(config, mark, deployment):
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # noqa: F401


def start_engine(
    config: VllmGeneratorConfig, folder: Path, mark: str, deployment: Deployment, frees_memory: bool = False
) -> "AsyncLLM":
    """An engine for the model whose config and tokenizer are in ``folder``, with random weights; its processes
    bear ``mark``. ``frees_memory``: it can let go of a GPU's memory. Takes 10 to 40 seconds; raises whatever vLLM
    raises."""
    with _environment(config, mark, deployment), bound(deployment.cores):
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
            enable_sleep_mode=frees_memory,
            **_lora(deployment.adapter),
        )
        return AsyncLLM.from_engine_args(settings)


def _lora(adapter: Adapter | None) -> dict[str, Any]:
    """Settings for one adapter at a time. Other modules stay as they are: wrapping them costs time and memory."""
    if adapter is None:
        return {}
    room = min(room for room in LORA_RANKS if room >= adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": list(adapter.modules)}


@contextmanager
def _environment(config: VllmGeneratorConfig, mark: str, deployment: Deployment) -> Iterator[None]:
    """Children inherit it; this process goes back to its own."""
    threads = config.threads or len(deployment.cores or ()) or cores()
    wanted = {
        MARK: mark,
        "SPT_NOENV": "1",  # vLLM gives its processes titles, which would overwrite the mark
        "OMP_NUM_THREADS": str(max(1, threads // config.tensor)),  # of each rank
        "OMP_WAIT_POLICY": "PASSIVE",  # the learner computes beside the engine's idle threads
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else one core is kept free
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_deadline)),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",  # nothing listens beyond this machine
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if deployment.gpus:
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(deployment.gpus)
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
