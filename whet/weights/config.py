"""The settings of weight syncs, and of the checks that the weights arrived."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.base.errors import ConfigError
from whet.cluster.config import DevicesConfig
from whet.config import Config
from whet.engines.config import GeneratorConfig
from whet.models.config import LoraSettings

TransportName = Literal["shared_memory", "disk", "collective", "cuda_ipc"]


def usual_bucket(transport: TransportName | None, on_gpu: bool) -> int:
    """Return the default size of a bucket in bytes."""
    return (512 if on_gpu and transport in ("cuda_ipc", "collective") else 64) * 2**20


class RefitConfig(Config):
    """The size of buckets of weights, and the checks after every publication to any generator; a mismatch stops the run
    and names the tensors."""

    bucket_mb: float | None = Field(None, gt=0, le=1_000_000)
    """Weights are gathered and sent in buckets of this size, in MiB; a larger tensor is sent alone. None: 512 from GPU
    to GPU, where the number of buckets costs more than their size, otherwise 64."""
    digest: bool = True
    """Compare every tensor of the generator with the learner's: bit for bit if both are in one process, otherwise by
    digests; for an engine, also read back the values that its layers compute with."""
    probe: bool = True
    """Compare log-probs of a few tokens, computed by the generator's decode path, with the learner's."""
    probe_tokens: int = Field(8, gt=0)
    """Length of the probe."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Maximum mean difference of log-probs; by default 1e-3 if generator and learner compute in float32 or finer, 0.25
    if one of them computes in bfloat16."""

    @property
    def bucket_bytes(self) -> int | None:
        """``bucket_mb`` in bytes."""
        return None if self.bucket_mb is None else int(self.bucket_mb * 2**20)


class WeightSyncConfig(RefitConfig):
    """The ``weights`` section of a recipe. The additional settings are for engines in other processes: the built-in
    generator loads weights in place, and a recipe that sets any of them with it is refused."""

    transport: TransportName | None = None
    """The transport to an engine in other processes; None: ``shared_memory``. ``collective``: a broadcast, by gloo
    between CPUs and by NCCL between GPUs. ``cuda_ipc``, with devices.placement=colocated: memory of the GPUs that
    learner and engine share."""
    lora: Literal["merged", "adapter"] = "merged"
    """The weights to send if ``model.lora`` is set. ``merged``: all weights, each time. ``adapter``, with
    generator=vllm: the frozen weights once, then LoRA's tensors alone, which the engine applies separately from its
    matrices."""
    folder: Path | None = None
    """The folder of ``transport=disk``. The learner's first rank and the engine must both see it; None: the system's
    folder for temporary files."""
    deadline: float = Field(300.0, gt=0)
    """Seconds that learner and engines may wait for each other in a ``collective``."""
    delta: bool = False
    """With ``transport=collective``: send only the weights whose bits changed since the last publication, which in
    bfloat16 are few. The first rank and each process of an engine keep a copy of the model for it."""
    columns: int = Field(16, gt=0)
    """Number of columns of each matrix that are read back from an engine; different ones after each publication."""

    def problems(
        self, generator: GeneratorConfig | None, lora: LoraSettings | None, devices: DevicesConfig
    ) -> Iterator[str]:
        """Yield the settings that can't be combined with the rest of a recipe. ``generator`` is None if nothing is
        sampled, ``lora`` if the whole model is trained."""
        if generator is not None and generator.in_process:
            for name, value in self.beyond_this_process().items():
                yield (
                    f"weights.{name} = {value} is for an engine in other processes, and needs generator = vllm; "
                    f"choose that, or leave weights.{name} out"
                )
            return
        if self.delta and self.transport != "collective":
            yield (
                "weights.delta = true is for weights that are sent over a network; set weights.transport=collective, "
                "or leave weights.delta out"
            )
        if self.lora == "adapter":
            yield from self._problems_of_adapter(generator, lora)
        elif generator is not None and generator.adapter_names:
            yield (
                "generator.adapters are applied to the frozen model under an adapter that is trained; set model.lora "
                "and weights.lora=adapter, or leave generator.adapters out"
            )
        if generator is not None and self.transport == "cuda_ipc":
            yield from self._problems_of_shared_gpus(generator, devices)
        on_gpus = generator is not None and bool(generator.gpus)
        if on_gpus and self.transport == "collective" and devices.placement == "colocated":
            yield (
                "weights.transport = collective sends from GPU to GPU by NCCL, which refuses two ranks on one GPU, as "
                "learner and engine are with devices.placement = colocated; set weights.transport=cuda_ipc"
            )

    def check_device(self, device: str, shared: bool = False) -> None:
        """Raise ``ConfigError`` if weights on a learner's ``device`` can't use this transport. ``shared``: engines on
        the nodes of a cluster have the devices of the learner's ranks."""
        if shared and device.startswith("cuda") and self.transport in (None, "collective"):
            raise ConfigError(
                "engines share the learner's GPUs (generator.on_cluster, devices.placement=colocated), between which "
                "NCCL refuses to send; set weights.transport=cuda_ipc"
            )
        if self.transport == "cuda_ipc" and not device.startswith("cuda"):
            raise ConfigError(
                f"weights.transport=cuda_ipc uses a GPU's memory, but the learner computes on {device}; set "
                "weights.transport=shared_memory"
            )

    def beyond_this_process(self) -> dict[str, object]:
        """Return the settings with non-default values that only engines in other processes use."""
        return self.changed(name for name in type(self).model_fields if name not in RefitConfig.model_fields)

    def _problems_of_adapter(self, generator: GeneratorConfig | None, lora: LoraSettings | None) -> Iterator[str]:
        purpose = "weights.lora = adapter sends LoRA's tensors to an engine that applies them"
        if lora is None:
            yield f"{purpose}, but model.lora is not set; set it, or leave weights.lora out"
        elif generator is None:
            yield f"{purpose}, but this run has no generator; leave weights.lora out"
        elif lora.dora:
            yield f"{purpose}, which can't apply model.lora.dora = true; set weights.lora=merged, or leave dora out"
        elif reason := generator.cannot_adapt(lora.rank):
            yield f"{purpose}, but model.lora.rank is {lora.rank}: {reason}; lower it, or set weights.lora=merged"

    def _problems_of_shared_gpus(self, generator: GeneratorConfig, devices: DevicesConfig) -> Iterator[str]:
        purpose = "weights.transport = cuda_ipc uses the memory of GPUs that learner and engine share"
        if devices.placement != "colocated":
            yield (
                f"{purpose}, but devices.placement = {devices.placement} gives them different GPUs; set "
                "devices.placement=colocated, or weights.transport=collective or shared_memory"
            )
        if generator.on_cluster:
            return
        if not generator.gpus:
            yield f"{purpose}, one rank of each on a GPU, but generator.devices doesn't name them; set it"
        elif len(set(generator.gpus)) < len(generator.gpus):
            named = ",".join(generator.gpus)
            yield f"{purpose}, one rank of each on a GPU, but generator.devices = {named!r} names a GPU twice"
