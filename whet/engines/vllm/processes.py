"""The processes of a vLLM engine: their environment, their start and their end. They have a mark in their environment,
by which they are found, even if an engine has started only partly.

Who waits for whom: ``start`` waits until the engine runs, ``end`` until its processes are gone. When this process ends
in any way, a guard kills them (``guard.py``).
"""

import asyncio
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import psutil
import torch

from whet.base.scratch import Scratch
from whet.base.strict_json import JsonObject
from whet.engines.adapters import read_adapters
from whet.engines.config import Deployment
from whet.engines.vllm.config import CPU_CACHE_GIB, LORA_RANKS, VllmGeneratorConfig
from whet.engines.vllm.guard import MARK, marked, start_guard
from whet.engines.vllm.images import READS, prepare
from whet.models.loading import save_processor
from whet.processes.child import thread_settings
from whet.processes.machine import bound, cores, environment, free_memory_fraction

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER = "whet.engines.vllm.worker.VllmWorker"
_SHARE = 0.9  # share of a GPU's free memory that an engine uses
_PATIENCE = 5.0  # seconds for processes to exit by themselves
_SOCKET = 107 - len(f"/{UUID(int=0)}")  # characters that the folder of a socket may have


class VllmProcesses:
    """The processes of one engine, which is started once."""

    def __init__(self, config: VllmGeneratorConfig, deployment: Deployment) -> None:
        self.config, self.deployment = config, deployment
        self.ids: list[int] = []
        self.scratch = Scratch("vllm")  # for the model's config, and vLLM's temporary files
        self.folder = self.scratch.path
        self.mark = self.folder.name
        self.guard: subprocess.Popen[bytes] | None = None
        self._starting = False

    @property
    def on_gpus(self) -> bool:
        """True if the engine has GPUs. This process may see none."""
        return bool(self.deployment.gpus)

    @property
    def compiles(self) -> bool:
        return self.on_gpus if self.config.compile is None else self.config.compile

    @property
    def frees_memory(self) -> bool:
        """True if the engine can free a GPU's memory (vLLM's sleep mode, which doesn't exist on CPUs)."""
        return self.deployment.sleeps and self.on_gpus

    async def start(self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None") -> "AsyncLLM":
        """Return an engine with random weights. Takes 10 to 40 seconds; raises vLLM's errors."""
        _write(self.folder, model, tokenizer)
        if self.deployment.images is not None:
            save_processor(self.deployment.images.folder, self.folder)
        self.guard = start_guard(self.mark)
        await asyncio.to_thread(self._import)
        engine = await asyncio.to_thread(self._start)
        self.ids = sorted(process.pid for process in await asyncio.to_thread(marked, self.mark))
        return engine

    def _import(self) -> None:
        """Import vLLM, in a separate call: during its import, vLLM stores an exception whose traceback permanently
        references the importer's frames and their variables."""
        with environment(self.environment()):
            import vllm.engine.arg_utils
            import vllm.v1.engine.async_llm  # noqa: F401

    def _start(self) -> "AsyncLLM":
        self._starting = True  # the start continues if its caller is cancelled
        try:
            with environment(self.environment()), bound(self.deployment.cores):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                if self.deployment.images is not None:
                    prepare()  # also for the processes that are forked from this one
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings()))
        finally:
            self._starting = False

    def _settings(self) -> dict[str, object]:
        config, adapter = self.config, self.deployment.adapter
        settings: JsonObject = {
            "model": str(self.folder),
            "skip_tokenizer_init": not (self.folder / "tokenizer_config.json").exists(),
            "load_format": "dummy",  # weights are sent by the learner
            "dtype": config.dtype,
            "max_model_len": config.max_context,
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": max(config.prefill_tokens or (8192 if self.on_gpus else 4096), config.max_batch),
            "tensor_parallel_size": config.tensor,
            **({"distributed_executor_backend": "mp"} if config.tensor > 1 else {}),  # not Ray, even in a Ray actor
            "enforce_eager": not self.compiles,
            "logprobs_mode": "processed_logprobs",  # with temperature and filters applied
            "max_logprobs": -1,  # a judge may ask for any number of tokens
            "generation_config": "vllm",  # no sampling defaults from the model's files
            "worker_extension_cls": _WORKER,
            "disable_log_stats": True,
            "enable_sleep_mode": self.frees_memory,
            "kv_cache_dtype": config.kv_dtype or "auto",
            "enable_prefix_caching": None if config.prefix_caching else False,  # None: for models that support it
            **self._cache(),
        }
        if self.deployment.images is not None:
            # The processor normalizes pixels: vLLM's layer for that has constants, which dummy weights replace.
            settings["mm_device_do_normalize"] = False
            settings["skip_mm_profiling"] = not self.on_gpus  # of memory, which CPUs don't divide in advance
        if config.quantization:
            settings["quantization"] = "fp8_per_channel"  # quantizes while weights are loaded
        if config.speculative is not None:
            guesses = {"num_speculative_tokens": config.speculative.tokens}
            settings["speculative_config"] = config.speculative.settings() | guesses
            settings["sleep_preserve_parameter_names"] = ["draft.*"] if self.frees_memory else []
        # A prompt in parts rewinds its random generator, which CPU generators don't support, and cuts images.
        images = self.deployment.images
        if not self.on_gpus or (images is not None and images.looks_ahead is not None):
            tokens = max(settings["max_num_batched_tokens"], config.max_context)
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        if self.on_gpus and config.dtype != "float32" and adapter is None:
            settings["hf_overrides"] = {"head_dtype": "float32"}  # products of the head as in the learner
        if adapter is not None:  # other modules are not wrapped, which would cost time and memory
            frozen = read_adapters(config.adapters)
            room = min(room for room in LORA_RANKS if room >= max(adapter.rank, *(each.rank for each in frozen), 1))
            # On CPUs vLLM 0.32 answers requests without an adapter under the last one: that place stays empty.
            places = 1 + len(frozen) + (0 if self.on_gpus else 1)
            settings |= {"enable_lora": True, "max_loras": places, "max_lora_rank": room}
            ends = {name.rpartition(".")[2] for each in frozen for name in each.shapes}
            settings["lora_target_modules"] = sorted({*adapter.modules, *ends})
        return settings

    def _cache(self) -> dict[str, object]:
        """Return the settings of the KV cache's size on each rank."""
        if not self.on_gpus or self.config.cache_gib is not None:
            gib = self.config.cache_gib or CPU_CACHE_GIB
            settings: JsonObject = {"kv_cache_memory_bytes": int(gib * 2**30 / self.config.tensor)}
            # vLLM requires this share of all memory to be free, by default 0.92, even if the size is set.
            return settings | ({"gpu_memory_utilization": 0.01} if self.on_gpus else {})
        return {"gpu_memory_utilization": round(_SHARE * free_memory_fraction(self.deployment.gpus), 3)}

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the processes."""
        config, threads = self.config, self.config.threads or len(self.deployment.cores or ()) or cores()
        variables = thread_settings(max(1, threads // config.tensor)) | {  # for each rank
            MARK: self.mark,
            "SPT_NOENV": "1",  # vLLM sets process titles, which would overwrite the mark
            "TMPDIR": str(self.folder),  # ranks meet in a file there, which vLLM doesn't remove
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise one core stays idle
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_deadline)),
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",  # listen only on this machine
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        if len(os.fsencode(self.folder)) <= _SOCKET:
            variables["VLLM_RPC_BASE_PATH"] = str(self.folder)  # of its sockets, which vLLM doesn't remove either
        if self.deployment.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.deployment.gpus)
            if torch.cuda.is_available():
                torch.cuda.init()  # fixes the GPUs that this process sees before the variable changes
        if self.deployment.images is not None:
            variables[READS] = "images"
        if not self.compiles:
            # Otherwise the sampler compiles a helper at its first token for half a minute.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables

    async def end(self, engine: "AsyncLLM | None") -> None:
        """End an engine; None if it did not start completely: request shutdown, then kill."""
        if engine is not None and engine.output_handler is not None:
            engine.output_handler.cancel()  # otherwise it reports the engine's end as a failure
        remaining = await asyncio.to_thread(self._end, engine)
        if self.guard is not None and not remaining and not self._starting:
            self.guard.kill()
            self.guard.wait(_PATIENCE)
        self.scratch.remove()

    def _end(self, engine: "AsyncLLM | None") -> list[psutil.Process]:
        remaining = marked(self.mark) if self.guard is not None and engine is None else []
        # a dead process has no mark
        remaining += [process for process in psutil.process_iter() if process.pid in self.ids]
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                if engine is None or process.status() == psutil.STATUS_STOPPED:  # a frozen process doesn't react
                    process.kill()
        if engine is not None:
            _shut_down(engine)
        _, remaining = psutil.wait_procs(remaining, timeout=_PATIENCE)
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return psutil.wait_procs(remaining, timeout=_PATIENCE)[1]


def _shut_down(engine: "AsyncLLM") -> None:
    try:
        engine.shutdown(timeout=_PATIENCE)
    except psutil.NoSuchProcess:  # one of its processes ended while vLLM was about to kill it
        # Sockets that stay open let the garbage collection wait for them, without an end and in any thread.
        engine.engine_core.resources()


def _write(folder: Path, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Write the files from which vLLM reads a model: config and tokenizer, without weights."""
    model.save_pretrained(folder)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not facts.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as architectures

        facts["architectures"] = [architectures[facts["model_type"]]]
        (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
