"""The settings that all generators share, and the run's requirements of a generator. Imports no torch, because recipes
are read with this."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from whet.base.errors import ConfigError
from whet.base.lazy import Dtype
from whet.config import Config
from whet.config.entry_points import EntryPoints
from whet.core.types import Distribution
from whet.processes.machine import slice_for_rank, visible_gpus
from whet.processes.user_code import place_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.cluster.base import Cluster
    from whet.cluster.config import ClusterConfig, DevicesConfig
    from whet.engines.base import Engine, PausableEngine
    from whet.models.image_processor import ImageProcessor


GENERATORS = EntryPoints("whet.engines")
"""The engines that a recipe can name, offered by whet and by other installed distributions."""

GONE = {"router": "set the engine's replicas, as in {type: vllm, replicas: 2}"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """The shape of the LoRA adapter that will be published to an engine."""

    rank: int
    modules: tuple[str, ...]  # the ends of the names of the adapted modules


@dataclass(frozen=True, slots=True)
class Deployment:
    """The resources and options of a generator in one run."""

    cores: Sequence[int] | None = None  # the numbers of the cores it is bound to; None: not bound
    gpus: tuple[str, ...] = ()  # its GPUs, as in CUDA_VISIBLE_DEVICES; empty: all GPUs that the process sees
    sleeps: bool = False  # it frees its GPU memory while the learner computes
    cluster: "Cluster | None" = None  # the cluster of replicas with ``generator.on_cluster``
    adapter: Adapter | None = None  # published separately from the frozen weights; None: weights are merged
    record_experts: bool = False  # completions have the experts of their tokens
    images: "ImageProcessor | None" = None  # of a model that reads images


class GeneratorConfig(Config, ABC):
    """The settings of a generator. Subclass it for your own generator and name the class in ``generator.type``."""

    in_process: ClassVar[bool] = False
    """True if it computes in the run's process, in which weights are copied to it."""
    records_experts: ClassVar[bool] = False
    """True if it can record the experts of tokens."""
    serves_adapters: ClassVar[bool] = False
    """True if it samples from the model under frozen adapters and without any (``SamplingParams.adapter``)."""
    pauses: ClassVar[bool] = False
    """True if its engine is a ``PausableEngine``."""

    dtype: Literal["auto"] | Dtype = "auto"
    """The dtype of its computations. ``auto``: as ``learner.precision`` chooses."""
    max_batch: int = Field(default=64, ge=1, le=100_000)
    """Maximum number of completions decoded at once; more requests wait in a queue."""
    max_context: int = Field(default=4096, ge=2)
    """Maximum number of tokens of prompt and completion together."""
    replicas: int = Field(default=1, ge=1, le=1000)
    """Number of engines with the same weights; the samples of one prompt use the same replica."""
    prefix_weight: float = Field(default=2.0, ge=0)
    """With ``replicas``: how many outstanding tokens a replica may have more than another one for each token of a
    prompt that it has in its prefix cache and the other lacks, so that the request still goes to it. 0: only
    outstanding tokens count."""
    restarts: int = Field(default=3, ge=0)
    """With ``replicas``: how often in a row each replica that died or froze is restarted, while the other replicas
    continue. A replica that has answered again may be restarted as often again."""
    on_cluster: bool = False
    """With ``cluster=ray`` and an engine in separate processes: each replica runs on any node with room, where Ray
    reserves GPUs (one for each rank) and cores for it; with ``devices.placement=colocated`` on the GPUs of as many
    ranks of the learner. Otherwise all replicas run on the node where the run was started."""
    on_refit: Literal["recompute", "keep"] = "recompute"
    """Treatment of the KV cache of requests in flight when new weights arrive (``rollouts.max_staleness`` above 0).
    ``recompute``: it is computed again from the tokens, so that each later token is sampled from the new policy.
    ``keep`` costs nothing, but later tokens are sampled from a mixture of both policies."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a wait raises an error."""

    @property
    def ranks(self) -> int:
        """The number of processes that share the model of one replica."""
        return 1

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the frozen adapters that it serves."""
        return ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of all replicas, as in CUDA_VISIBLE_DEVICES; empty if the settings name none."""
        return ()

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of running servers whose weights it replaces."""
        return ()

    @property
    def refuses_images(self) -> str | None:
        """The setting because of which it can't sample from prompts with images, or None."""
        return f"generator = {type(self).__name__}"

    @property
    def keeps_images(self) -> bool:
        """True if what its vision tower has computed of an image stays in use after new weights."""
        return False

    @property
    def refuses_likeliest(self) -> str | None:
        """The setting because of which it can't report log-probs of other tokens than the sampled ones
        (``SamplingParams.likeliest`` and ``among``), or None."""
        return f"generator = {type(self).__name__}"

    @property
    def needs_dtype(self) -> Literal["bfloat16"] | None:
        """The dtype that its other settings require for ``dtype=auto``."""
        return None

    @property
    def low_precision_setting(self) -> str | None:
        """The setting that makes it compute with fewer bits than ``dtype``, so that its log-probs differ from the
        learner's."""
        return None

    def problems(self, cluster: "ClusterConfig", devices: "DevicesConfig") -> Iterator[str]:
        """Yield the settings that can't be combined with the rest of a recipe."""
        if not self.on_cluster:
            return
        purpose = "generator.on_cluster places engines on the nodes of a Ray cluster"
        if self.in_process:
            yield f"{purpose}, but this generator computes in the run's process; set generator=vllm"
        if not cluster.hosts_engines:
            yield f"{purpose}; set cluster=ray, or leave it out"
        if self.gpus:
            yield f"{purpose}, where Ray assigns GPUs to each; leave generator.devices out"
        if devices.generator_cores is not None:
            yield f"{purpose}, but devices.generator_cores is for this machine; leave it out"

    def cannot_run(self, model: "PretrainedConfig") -> str | None:
        """Return why an engine can't run a model, or None."""
        return None

    def cannot_sample(self, distribution: Distribution) -> str | None:
        """Return why an engine can't sample from a distribution, or None."""
        return None

    def cannot_adapt(self, rank: int) -> str | None:
        """Return why an engine can't apply LoRA of this rank separately from its matrices, or None."""
        return "this generator supports merged weights only"

    def memory(self, weights: int) -> dict[str, int]:
        """Return the bytes, by kind, on each rank of an engine in other processes for a model of ``weights`` bytes."""
        return {"weights": weights // self.ranks}

    def build(
        self,
        model: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        deployment: Deployment | None = None,
    ) -> "Engine[object]":
        """Return an engine for models of a transformers config, whose weights are published later."""
        if self.dtype == "auto":
            return self.resolve_auto(model).build(model, tokenizer, deployment)
        deployment = deployment or Deployment()
        all_gpus = visible_gpus(self.gpus, "generator.devices")
        each = len(all_gpus) // self.replicas

        def replica(number: int) -> "Engine[object]":
            if self.on_cluster:
                from whet.engines.remote import RemoteGenerator

                return RemoteGenerator(self, model, tokenizer, deployment, number)
            cores = deployment.cores  # in this process all replicas share one compute thread
            if cores is not None and not self.in_process:
                cores = slice_for_rank(cores, number, self.replicas)
            gpus = all_gpus[number * each : (number + 1) * each]
            return self.checked_replica(model, tokenizer, replace(deployment, cores=cores, gpus=gpus))

        if self.replicas == 1:
            return replica(0)
        from whet.engines.base import pausable
        from whet.engines.router import Router

        def pausable_replica(number: int) -> "PausableEngine[object]":
            return pausable(replica(number), "generator.replicas")

        engines = [pausable_replica(number) for number in range(self.replicas)]
        return Router(engines, self.prefix_weight, pausable_replica, self.restarts)

    def checked_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "Engine[object]":
        """Return ``build_replica``'s engine. Raises ``ConfigError`` if it isn't one."""
        engine = self.build_replica(model, tokenizer, deployment)
        if missing := [name for name in ("sample", "refit", "tally", "close") if not hasattr(engine, name)]:
            raise ConfigError(
                f"{place_of(type(self), 'build_replica')} must return an engine (Engine in whet/engines/base.py), not "
                f"a {type(engine).__name__}: it has no {', '.join(missing)}"
            )
        return engine

    def resolve_auto(self, model: "PretrainedConfig", device: Literal["cpu", "cuda"] | None = None) -> Self:
        """Return the settings with ``auto`` resolved to the dtype on a device; None: the device that it uses here."""
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
    ) -> "Engine[object]":
        """Return one engine, with the cores and GPUs of ``deployment``."""


class Guesses(Config):
    """A source of guesses of the next tokens, which the model verifies together: it keeps the ones that it
    would have sampled."""

    tokens: int = Field(default=4, ge=1, le=32)
    """Number of tokens that are guessed at a time."""


class NGram(Guesses):
    """Guesses the tokens that followed the same tokens earlier in the text. Costs nothing; helps if answers repeat
    their prompt."""

    longest: int = Field(default=4, ge=1)
    """Number of tokens that are searched for first, then gradually fewer."""
    shortest: int = Field(default=2, ge=1)
    """Minimum number of tokens that are searched for."""

    @model_validator(mode="after")
    def _in_order(self) -> "NGram":
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")
        return self
