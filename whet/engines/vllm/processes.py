"""The processes of a vLLM engine: what they are born with, their start and their end. They bear a mark in their
environment, by which they are found, also where an engine has started half-way.

Who waits for what: ``start`` waits until the engine is there, ``end`` until its processes are gone. When this process
ends, however it ends, a guard ends them (``vllm_guard.py``).
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil
import torch

from whet.engines.config import Deployment
from whet.engines.vllm.config import CPU_CACHE_GIB, LORA_RANKS, VllmGeneratorConfig
from whet.engines.vllm.guard import MARK, marked, start_guard
from whet.processes.child import thread_settings
from whet.processes.machine import bound, cores, environment, free_memory_fraction

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER = "whet.engines.vllm.worker.VllmWorker"
_SHARE = 0.9  # of a GPU's free memory, that an engine takes
_PATIENCE = 5.0  # seconds that processes have to end by themselves


class VllmProcesses:
    """The processes of one engine, which is started once."""

    def __init__(self, config: VllmGeneratorConfig, deployment: Deployment) -> None:
        self.config, self.deployment = config, deployment
        self.ids: list[int] = []
        self.mark = f"whet-vllm-{uuid4().hex}"
        self.folder = Path(tempfile.gettempdir()) / self.mark  # the model's config; what vLLM leaves behind
        self.guard: subprocess.Popen[bytes] | None = None
        self._starting = False

    @property
    def on_gpus(self) -> bool:
        """Whether the engine has GPUs. This process may see none."""
        return bool(self.deployment.gpus)

    @property
    def compiles(self) -> bool:
        return self.on_gpus if self.config.compile is None else self.config.compile

    @property
    def frees_memory(self) -> bool:
        """True where the engine can let go of a GPU's memory (vLLM's sleep mode; it has nothing like it on CPUs)."""
        return self.deployment.sleeps and self.on_gpus

    async def start(self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None") -> "AsyncLLM":
        """Return an engine with random weights. Takes 10 to 40 seconds; raises whatever vLLM raises."""
        self.folder.mkdir(mode=0o700)
        _write(self.folder, model, tokenizer)
        self.guard = start_guard(self.mark)
        await asyncio.to_thread(self._import)
        engine = await asyncio.to_thread(self._start)
        self.ids = sorted(process.pid for process in await asyncio.to_thread(marked, self.mark))
        return engine

    def _import(self) -> None:
        """Import vLLM, in a call of its own: while it is imported, vLLM keeps an exception whose traceback
        holds the frames of whoever imported it, and what these hold, for ever."""
        with environment(self.environment()):
            import vllm.engine.arg_utils
            import vllm.v1.engine.async_llm  # noqa: F401

    def _start(self) -> "AsyncLLM":
        self._starting = True  # whoever waits for it may give up, and it goes on
        try:
            with environment(self.environment()), bound(self.deployment.cores):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings()))
        finally:
            self._starting = False

    def _settings(self) -> dict[str, Any]:
        config, adapter = self.config, self.deployment.adapter
        settings: dict[str, Any] = {
            "model": str(self.folder),
            "skip_tokenizer_init": not (self.folder / "tokenizer_config.json").exists(),
            "load_format": "dummy",  # weights come from the learner
            "dtype": config.dtype,
            "max_model_len": config.max_context,
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": max(config.prefill_tokens or (8192 if self.on_gpus else 4096), config.max_batch),
            "tensor_parallel_size": config.tensor,
            **({"distributed_executor_backend": "mp"} if config.tensor > 1 else {}),  # not Ray, in an actor of it
            "enforce_eager": not self.compiles,
            "logprobs_mode": "processed_logprobs",  # of what is sampled from: temperature and filters applied
            "generation_config": "vllm",  # no sampling defaults from the model's files
            "worker_extension_cls": _WORKER,
            "disable_log_stats": True,
            "enable_sleep_mode": self.frees_memory,
            "kv_cache_dtype": config.kv_dtype or "auto",
            "enable_prefix_caching": None if config.prefix_caching else False,  # None: for models that can
            **self._cache(),
        }
        if config.quantization:
            settings["quantization"] = "fp8_per_channel"  # as the weights come
        if config.speculative is not None:
            guesses = {"num_speculative_tokens": config.speculative.tokens}
            settings["speculative_config"] = config.speculative.settings() | guesses
            settings["sleep_preserve_parameter_names"] = ["draft.*"] if self.frees_memory else []
        if not self.on_gpus:  # a prompt in parts turns back the generator of its seed, which those of CPUs can't
            tokens = max(settings["max_num_batched_tokens"], config.max_context)
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        if self.on_gpus and config.dtype != "float32" and adapter is None:
            settings["hf_overrides"] = {"head_dtype": "float32"}  # products of the head, as the learner has them
        if adapter is not None:  # one at a time. Other modules stay as they are: wrapping them costs time and memory
            room = min(room for room in LORA_RANKS if room >= adapter.rank)
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
            settings["lora_target_modules"] = list(adapter.modules)
        return settings

    def _cache(self) -> dict[str, Any]:
        """Return what says how much memory keys and values get, on each rank."""
        if not self.on_gpus or self.config.cache_gib is not None:
            gib = self.config.cache_gib or CPU_CACHE_GIB
            settings: dict[str, Any] = {"kv_cache_memory_bytes": int(gib * 2**30 / self.config.tensor)}
            # vLLM wants this share of all memory to be free, 0.92 unless told, also where the size is given.
            return settings | ({"gpu_memory_utilization": 0.01} if self.on_gpus else {})
        return {"gpu_memory_utilization": round(_SHARE * free_memory_fraction(self.deployment.gpus), 3)}

    def environment(self) -> dict[str, str]:
        """Return the variables that the processes are born with."""
        config, threads = self.config, self.config.threads or len(self.deployment.cores or ()) or cores()
        wanted = thread_settings(max(1, threads // config.tensor)) | {  # of each rank
            MARK: self.mark,
            "SPT_NOENV": "1",  # vLLM gives its processes titles, which would overwrite the mark
            "TMPDIR": str(self.folder),  # where ranks meet; vLLM leaves that file behind
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else one core is kept free
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_deadline)),
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",  # nothing listens beyond this machine
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        if self.deployment.gpus:
            wanted["CUDA_VISIBLE_DEVICES"] = ",".join(self.deployment.gpus)
            if torch.cuda.is_available():
                torch.cuda.init()  # which GPUs this process itself sees is settled before the variable changes
        if not self.compiles:
            wanted["TORCHDYNAMO_DISABLE"] = "1"  # else the sampler compiles a helper at its first token: half a minute
        return wanted

    async def end(self, engine: "AsyncLLM | None") -> None:
        """End an engine, None where it did not start, or not completely: ask, then kill."""
        if engine is not None and engine.output_handler is not None:
            engine.output_handler.cancel()  # else it reports the engine's end as a failure
        left = await asyncio.to_thread(self._end, engine)
        if self.guard is not None and not left and not self._starting:
            self.guard.kill()
            self.guard.wait(_PATIENCE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, engine: "AsyncLLM | None") -> list[psutil.Process]:
        left = marked(self.mark) if self.guard is not None and engine is None else []
        left += [process for process in psutil.process_iter() if process.pid in self.ids]  # a dead one has no mark
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if engine is None or process.status() == psutil.STATUS_STOPPED:  # a frozen one doesn't listen
                    process.kill()
        if engine is not None:
            engine.shutdown(timeout=_PATIENCE)
        _, left = psutil.wait_procs(left, timeout=_PATIENCE)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return psutil.wait_procs(left, timeout=_PATIENCE)[1]


def _write(folder: Path, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Write what vLLM reads a model from: config and tokenizer, no weights."""
    model.save_pretrained(folder)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not facts.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

        facts["architectures"] = [known[facts["model_type"]]]
        (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
