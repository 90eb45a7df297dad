"""The settings that every generator has, and what a recipe asks of them. Recipes are read with this: no torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from whet.base.dtype import Dtype
from whet.config import Config
from whet.core.types import Distribution
from whet.processes.machine import slice_for_rank, visible_gpus

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.cluster.config import ClusterConfig, DevicesConfig
    from whet.engines.base import Refittable


@dataclass(frozen=True, slots=True)
class Adapter:
    """The shape of the LoRA adapter that will be published to an engine, one at a time."""

    rank: int
    modules: tuple[str, ...]  # the ends of the names of those it is applied to


@dataclass(frozen=True, slots=True)
class Deployment:
    """How one run uses a generator."""

    cores: Sequence[int] | None = None  # the numbers of those that it is bound to; None: to none
    gpus: tuple[str, ...] = ()  # its own, as CUDA_VISIBLE_DEVICES names them; empty: those that the process sees
    sleeps: bool = False  # it makes room on its GPUs while the learner computes
    cluster: "ClusterConfig | None" = None  # where replicas run with ``generator.on_cluster``
    adapter: Adapter | None = None  # published beside frozen weights; None: weights come merged
    record_experts: bool = False  # completions tell which experts their tokens went to


class GeneratorConfig(Config, ABC):
    """The settings of a generator. Derive those of your own from it and name the class in ``generator.type``."""

    in_process: ClassVar[bool] = False
    """Whether it computes in the run's own process, where weights are copied to it."""
    records_experts: ClassVar[bool] = False
    """Whether it can tell which experts tokens went to."""

    dtype: Literal["auto"] | Dtype = "auto"
    """In which it computes. ``auto``: as ``learner.precision`` chooses."""
    max_batch: int = Field(default=64, ge=1, le=100_000)
    """Completions decoded side by side; more requests wait in a queue."""
    max_context: int = Field(default=4096, ge=2)
    """Most tokens of prompt and completion together."""
    replicas: int = Field(default=1, ge=1, le=1000)
    """Engines with the same weights; the samples of one prompt meet on one of them."""
    slack: int = Field(default=16, ge=0)
    """With ``replicas``: a request goes where its prompt is known, unless that replica has this many more requests
    under way than the least busy one."""
    restarts: int = Field(default=3, ge=0)
    """With ``replicas``: how often in a run each one that died or froze is started again, while the others go on."""
    on_cluster: bool = False
    """With ``cluster=ray`` and an engine in processes of its own: each replica runs on any node with room, where Ray
    sets GPUs (one for each rank) and cores aside for it. Else all run where the run was started."""
    on_refit: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of requests under way when new weights come (``rollouts.max_staleness`` above
    0): computed anew from the tokens, so that each later token is the new policy's; or kept, which costs nothing, and
    what follows is sampled by a mixture of both policies."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a wait is an error."""

    @property
    def ranks(self) -> int:
        """The number of processes that share the model of one replica."""
        return 1

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of all replicas, as CUDA_VISIBLE_DEVICES names them; empty where the settings name none."""
        return ()

    @property
    def needs_dtype(self) -> Literal["bfloat16"] | None:
        """What ``dtype=auto`` has to be for its other settings."""
        return None

    @property
    def narrow(self) -> str | None:
        """The setting by which it computes in fewer bits than ``dtype`` has, so that its log-probs are its own."""
        return None

    def problems(self, cluster: "ClusterConfig", devices: "DevicesConfig") -> Iterator[str]:
        """Name what does not go together with the rest of a recipe."""
        if not self.on_cluster:
            return
        what = "generator.on_cluster puts engines on the nodes of a Ray cluster"
        if self.in_process:
            yield f"{what}, and this generator computes in the run's own process; set generator=vllm"
        if not cluster.hosts_engines:
            yield f"{what}; set cluster=ray, or leave it out"
        if self.gpus:
            yield f"{what}, where Ray gives each its GPUs; leave generator.devices out"
        if devices.placement == "colocated" or devices.generator_cores is not None:
            yield f"{what}, and devices is about this machine's; leave devices.placement and generator_cores out"

    def cannot_run(self, model: "PretrainedConfig") -> str | None:
        """Return why an engine can't run a model, in words."""
        return None

    def cannot_sample(self, distribution: Distribution) -> str | None:
        """Return why an engine can't sample from a distribution, in words."""
        return None

    def cannot_adapt(self, rank: int) -> str | None:
        """Return why an engine can't apply LoRA of this rank beside its matrices, in words."""
        return "this generator takes merged weights only"

    def memory(self, weights: int) -> dict[str, int]:
        """Return the bytes, by kind, that each rank of an engine in other processes holds of a model of ``weights``
        bytes."""
        return {"weights": weights // self.ranks}

    def build(
        self,
        model: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        deployment: Deployment | None = None,
    ) -> "Refittable[Any]":
        """Return a generator for models of a transformers config, whose weights are still to be published."""
        if self.dtype == "auto":
            return self.decided(model).build(model, tokenizer, deployment)
        deployment = deployment or Deployment()
        every = visible_gpus(self.gpus, "generator.devices")
        each = len(every) // self.replicas

        def replica(number: int) -> "Refittable[Any]":
            if self.on_cluster:
                from whet.engines.remote import HostedGenerator

                return HostedGenerator(self, model, tokenizer, deployment)
            own = deployment.cores  # in this process all replicas share one compute thread
            if own is not None and not self.in_process:
                own = slice_for_rank(own, number, self.replicas)
            gpus = every[number * each : (number + 1) * each]
            return self.build_replica(model, tokenizer, replace(deployment, cores=own, gpus=gpus))

        engines = [replica(number) for number in range(self.replicas)]
        if len(engines) == 1:
            return engines[0]
        from whet.engines.router import Router

        return Router(engines, self.slack, replica, self.restarts)

    def decided(self, model: "PretrainedConfig", device: Literal["cpu", "cuda"] | None = None) -> Self:
        """Return them with the ``dtype`` that ``auto`` is on a device; None: the one that it computes on here."""
        if self.dtype != "auto":
            return self
        import torch

        from whet.models.precision import choose_precision

        device = device or ("cuda" if self.gpus or torch.cuda.is_available() else "cpu")
        needed = self.needs_dtype or choose_precision(model, device).precision
        return self.model_copy(update={"dtype": needed})

    @abstractmethod
    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "Refittable[Any]":
        """Return one engine. ``deployment`` has the cores and GPUs that are its own."""
