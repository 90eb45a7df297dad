"""The settings of the way of new weights to the generator, and of the proofs that they arrived."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from whet.base.errors import ConfigError
from whet.cluster.config import DevicesConfig
from whet.config import Config
from whet.engines.config import GeneratorConfig
from whet.models.config import LoraSettings

TransportName = Literal["shared_memory", "disk", "collective", "cuda_ipc"]


def usual_bucket(transport: TransportName | None, on_gpu: bool) -> int:
    """Return the bytes of a bucket where a recipe names none."""
    return (512 if on_gpu and transport in ("cuda_ipc", "collective") else 64) * 2**20


class RefitConfig(Config):
    """The size of buckets of weights, and the proofs that run after every publication, wherever the generator is; a
    mismatch stops the run and names the tensors."""

    bucket_mb: float | None = Field(None, gt=0)
    """Weights are gathered and travel in buckets of this size, in MiB; a larger tensor travels alone. None: 512 from
    GPU to GPU, where each bucket costs more waits than bytes, else 64."""
    digest: bool = True
    """Compare every tensor the generator holds with the learner's: bit for bit where both are in one process, else by
    digests; of an engine, also read back what its layers compute with."""
    probe: bool = True
    """Compare log-probs of a few tokens, through the generator's decode path, with the learner's."""
    probe_tokens: int = Field(8, gt=0)
    """Length of the probe."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference of log-probs; by default 1e-3 where generator and learner compute in float32 or finer,
    0.25 where one of them computes in bfloat16."""

    @property
    def bucket_bytes(self) -> int | None:
        """``bucket_mb`` in bytes."""
        return None if self.bucket_mb is None else int(self.bucket_mb * 2**20)


class WeightSyncConfig(RefitConfig):
    """The ``weights`` section of a recipe. What it adds is about engines in other processes: the built-in generator
    takes weights where they are, and a recipe that sets any of it there is refused."""

    transport: TransportName | None = None
    """The way to an engine in other processes; None: ``shared_memory``. ``collective``: a broadcast, by gloo between
    CPUs and by NCCL between GPUs. ``cuda_ipc``, with devices.placement=colocated: memory of the GPUs that learner and
    engine share."""
    lora: Literal["merged", "adapter"] = "merged"
    """What travels where ``model.lora`` is set. ``merged``: all weights, each time. ``adapter``, with generator=vllm:
    the frozen weights once, then LoRA's tensors alone, which the engine applies beside its matrices."""
    folder: Path | None = None
    """Where ``transport=disk`` writes. The learner's first rank and the engine must both see it; None: the system's
    folder for temporary files."""
    deadline: float = Field(300.0, gt=0)
    """Seconds that learner and engines may wait for each other in a ``collective``."""
    columns: int = Field(16, gt=0)
    """Columns of each matrix that are read back from an engine; other ones after each publication."""

    def problems(
        self, generator: GeneratorConfig | None, lora: LoraSettings | None, devices: DevicesConfig
    ) -> Iterator[str]:
        """Name what does not go together with the rest of a recipe. ``generator`` is None where nothing samples,
        ``lora`` where the whole model is trained."""
        if generator is not None and generator.in_process:
            for name, value in self.beyond_this_process().items():
                yield (
                    f"weights.{name} = {value} is about an engine in other processes, and needs generator = vllm; "
                    f"choose that, or leave weights.{name} out"
                )
            return
        if self.lora == "adapter":
            yield from self._problems_of_adapter(generator, lora)
        if generator is not None and self.transport == "cuda_ipc":
            yield from self._problems_of_shared_gpus(generator, devices)
        on_gpus = generator is not None and bool(generator.gpus)
        if on_gpus and self.transport == "collective" and devices.placement == "colocated":
            yield (
                "weights.transport = collective goes from GPU to GPU by NCCL, which refuses two ranks on one, and with "
                "devices.placement = colocated learner and engine are; set weights.transport=cuda_ipc"
            )

    def check_device(self, device: str) -> None:
        """Raise ``ConfigError`` where weights that are on a learner's ``device`` can't go this way."""
        if self.transport == "cuda_ipc" and not device.startswith("cuda"):
            raise ConfigError(
                f"weights.transport=cuda_ipc goes through a GPU's memory, and the learner computes on {device}; set "
                "weights.transport=shared_memory"
            )

    def beyond_this_process(self) -> dict[str, Any]:
        """Return the settings that only engines in other processes read, where they are not as they are by default."""
        added = {name: field for name, field in type(self).model_fields.items() if name not in RefitConfig.model_fields}
        return {name: getattr(self, name) for name, field in added.items() if getattr(self, name) != field.default}

    def _problems_of_adapter(self, generator: GeneratorConfig | None, lora: LoraSettings | None) -> Iterator[str]:
        what = "weights.lora = adapter sends what LoRA trains to an engine that applies it"
        if lora is None:
            yield f"{what}, and model.lora is not set; set it, or leave weights.lora out"
        elif generator is None:
            yield f"{what}, and nothing samples here; leave weights.lora out"
        elif reason := generator.cannot_adapt(lora.rank):
            yield f"{what}, and model.lora.rank is {lora.rank}: {reason}; lower it, or set weights.lora=merged"

    def _problems_of_shared_gpus(self, generator: GeneratorConfig, devices: DevicesConfig) -> Iterator[str]:
        what = "weights.transport = cuda_ipc goes through the memory of GPUs that learner and engine share"
        if devices.placement != "colocated":
            yield (
                f"{what}, and devices.placement = {devices.placement} gives each its own; set "
                "devices.placement=colocated, or weights.transport=collective or shared_memory"
            )
        if not generator.gpus:
            yield f"{what}, one rank of each on a GPU, and generator.devices doesn't say which ones; set it"
        elif len(set(generator.gpus)) < len(generator.gpus):
            named = ",".join(generator.gpus)
            yield f"{what}, one rank of each on a GPU, and generator.devices = {named!r} names one twice"
