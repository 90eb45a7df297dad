"""The settings of clusters. Apart from the clusters, so that a recipe is read without Ray."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from whet.base.errors import WhetError
from whet.cluster.base import Cluster, Service
from whet.config import Config
from whet.config.nearest import did_you_mean

WORKERS = ("LearnerWorker", "HostedEngine")
"""The classes of what a run launches on a cluster."""


class ClusterConfig(Config, ABC):
    """Where the workers of a run's learners run."""

    has_processes: ClassVar[bool] = True
    """Whether each worker has a process of its own."""

    hosts_engines: ClassVar[bool] = False
    """Whether engines that sample can run on its nodes."""

    restarts: int = Field(2, ge=0)
    """How often a run that lost a worker, or the last of its engines, starts all again and goes on from its newest
    checkpoint."""

    @abstractmethod
    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        """The cluster. Nothing is started before the first launch. ``cores``: the numbers of those on this machine that
        its workers are bound to; None: to none. ``models``: how many will be launched."""

    def on_gpus(self) -> bool | None:
        """Return whether workers compute on GPUs where they may; None: they do where this machine has any."""
        return None

    def serve(self, service: type, config: Config, devices: int, deadline: float) -> Service:
        """An object on a node of its own choice that takes so many devices. Nothing is started before the first call.
        ``deadline``: seconds after which a process that says nothing hangs."""
        raise WhetError("generator.on_cluster needs a cluster with nodes; set cluster=ray")

    def problems(self, ranks: int) -> Iterator[str]:
        """Name what keeps it from running learners of ``ranks`` workers."""
        if ranks > 1 and not self.has_processes:
            yield (
                f"parallel asks for {ranks} ranks, and cluster = local has no processes for them; set "
                "cluster=processes or cluster=ray"
            )


class LocalClusterConfig(ClusterConfig):
    """In this process, each worker in a thread."""

    has_processes: ClassVar[bool] = False

    restarts: Literal[0] = 0
    """A worker of this process ends with it."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.local import LocalCluster

        return LocalCluster()


class ProcessClusterConfig(ClusterConfig):
    """On this machine, each worker in a process."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.processes import ProcessCluster

        return ProcessCluster(cores)


class RayClusterConfig(ClusterConfig):
    """On the nodes of a Ray cluster, each worker in an actor. Needs ``whet[ray]``."""

    hosts_engines: ClassVar[bool] = True

    address: str | None = None
    """``host:port`` of a Ray cluster to join, or ``auto`` for the one that Ray finds. None starts one on this machine
    that listens on loopback only and asks for a token that nobody else knows."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """Cores that are set aside for each rank of a learner, and of an engine with ``generator.on_cluster``."""
    gpus_per_rank: float | None = Field(None, ge=0)
    """GPUs that are set aside for each of these ranks. None: one where the cluster has any, else none."""
    models: Literal["apart", "together"] = "apart"
    """Where an algorithm has several (a policy and a critic): whether each has cores and GPUs of its own, or rank k of
    each shares those of rank k of the others. They compute one after the other."""
    strategy: Literal["pack", "spread"] = "pack"
    """Whether model replicas are put on few nodes or on many. The ranks of one replica share a node where one is large
    enough."""
    runtime_env: dict[str, dict[str, Any]] = Field(default={})
    """Ray's runtime environment for ``LearnerWorker`` or ``HostedEngine``: ``LearnerWorker: {py_executable: ...}``."""
    start_deadline: float = Field(300.0, gt=0)
    """Seconds within which the cluster must have room for a learner's workers, or an engine, and their actors must be
    up."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.ray_cluster import RayCluster

        return RayCluster(self, cores, models)

    def on_gpus(self) -> bool | None:
        if self.gpus_per_rank is not None:
            return self.gpus_per_rank > 0
        if self.address is None:
            return None
        from whet.cluster.ray_connection import has_gpus

        return has_gpus(self.address)

    def serve(self, service: type, config: Config, devices: int, deadline: float) -> Service:
        from whet.cluster.ray_service import ActorService

        return ActorService(self, service, config, devices, deadline)

    def problems(self, ranks: int) -> Iterator[str]:
        """Name what keeps it from running learners of ``ranks`` workers."""
        yield from super().problems(ranks)
        for name in sorted(self.runtime_env.keys() - set(WORKERS)):
            hint = f"{did_you_mean(name, WORKERS)} Known: {', '.join(WORKERS)}"
            yield f"cluster.runtime_env names no worker with {name!r}.{hint}"


class DevicesConfig(Config):
    """How learners and generator share this machine's cores and GPUs."""

    placement: Literal["split", "colocated"] = "split"
    """``split``: each computes when it has something to do. ``colocated``: they take turns on the same devices; while
    one computes, the other sleeps and, on a GPU, has made room."""
    learner_cores: int | None = Field(None, ge=1)
    """With ``split``, and ``cluster=processes`` or ``ray``: how many of this machine's cores the learners are bound to.
    None: those that ``generator_cores`` leaves, or all."""
    generator_cores: int | None = Field(None, ge=1)
    """The same of the generator. None: those that ``learner_cores`` leaves, or all."""
    deadline: float = Field(600.0, gt=0)
    """With ``colocated``: seconds that one may wait for the other, and that falling asleep and waking may take."""

    def problems(self, cluster: ClusterConfig, samples: bool) -> Iterator[str]:
        """Name what does not go together with the rest of a recipe, in which something ``samples`` or nothing does."""
        cores = self.learner_cores is not None or self.generator_cores is not None
        if self.placement == "colocated" and not samples:
            yield "devices.placement = colocated: this algorithm has no generator to take turns with"
        if self.placement == "colocated" and cores:
            yield (
                "devices.learner_cores and generator_cores divide the machine, and devices.placement = colocated gives "
                "all of it to one after the other; leave them out"
            )
        if cores and not cluster.has_processes:
            yield (
                "devices.learner_cores and generator_cores bind processes to cores, and cluster = local has none of "
                "their own for learners; set cluster=processes or cluster=ray"
            )
