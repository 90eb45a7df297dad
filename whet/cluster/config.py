"""The settings of clusters, in a separate module, so that recipes are read without Ray."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from whet.cluster.base import Cluster
from whet.config import Config
from whet.config.issues import did_you_mean

CLUSTERS = {
    "local": "whet.cluster.config:LocalClusterConfig",
    "processes": "whet.cluster.config:ProcessClusterConfig",
    "ray": "whet.cluster.config:RayClusterConfig",
}
"""Built-in clusters by the name that recipes use."""

WORKERS = ("LearnerWorker", "HostedEngine")
"""The names of the classes that a run launches on a cluster."""


class ClusterConfig(Config, ABC):
    """The cluster on which the workers of a run's learners run."""

    has_processes: ClassVar[bool] = True
    """True if each worker has a separate process."""

    hosts_engines: ClassVar[bool] = False
    """True if inference engines can run on its nodes."""

    restarts: int = Field(2, ge=0)
    """Number of restarts, from the newest checkpoint, of a run that lost a worker or its last engine."""

    @abstractmethod
    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        """Return the cluster; nothing is started before the first launch. ``cores``: CPU affinity of the workers on
        this machine, None: unbound. ``models``: number of worker groups that will be launched."""

    @property
    def separates_models(self) -> bool:
        """True if each of a run's models has separate cores and GPUs."""
        return False

    @property
    def joined(self) -> bool:
        """True if the run joins it, so that it may have other machines than this one."""
        return False

    def on_gpus(self) -> bool | None:
        """Return whether workers compute on GPUs if allowed; None: if this machine has GPUs."""
        return None

    def problems(self, ranks: int) -> Iterator[str]:
        """Yield the reasons why it can't run learners with ``ranks`` workers."""
        if ranks > 1 and not self.has_processes:
            yield (
                f"parallel needs {ranks} ranks, but cluster = local has no processes for them; set cluster=processes "
                "or cluster=ray"
            )


class LocalClusterConfig(ClusterConfig):
    """Workers in this process, in its compute thread."""

    has_processes: ClassVar[bool] = False

    restarts: Literal[0] = 0
    """A worker in this process ends with it."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.local import LocalCluster

        return LocalCluster()


class ProcessClusterConfig(ClusterConfig):
    """Workers on this machine, each in a process."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.processes import ProcessCluster

        return ProcessCluster(cores)


class RayClusterConfig(ClusterConfig):
    """Workers on the nodes of a Ray cluster, each in an actor. Needs ``whet[ray]``."""

    hosts_engines: ClassVar[bool] = True

    address: str | None = None
    """``host:port`` of a Ray cluster to join, or ``auto`` for the one that Ray finds. None starts one on this machine
    that listens only on loopback and requires a random token."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """Cores reserved for each rank of a learner, and of an engine with ``generator.on_cluster``."""
    gpus_per_rank: float | None = Field(None, ge=0)
    """GPUs reserved for each of these ranks. None: one if the cluster has GPUs, else none."""
    models: Literal["apart", "together"] = "apart"
    """For several models (a policy and a critic, several policies): ``apart`` gives each model separate cores and GPUs;
    with ``together`` rank k of each model shares cores and GPUs, and the models compute one after the other."""
    strategy: Literal["pack", "spread"] = "pack"
    """``pack`` model replicas on few nodes or ``spread`` them over many. The ranks of one replica share a node if one
    is large enough."""
    runtime_env: dict[str, dict[str, object]] = Field(default={})
    """Ray's runtime environment for ``LearnerWorker`` or ``HostedEngine``: ``LearnerWorker: {py_executable: ...}``."""
    start_deadline: float = Field(300.0, gt=0)
    """Seconds within which the cluster must have resources for a learner's workers, or an engine, and their actors must
    have started."""

    def build(self, cores: Sequence[int] | None = None, models: int = 1) -> Cluster:
        from whet.cluster.ray_cluster import RayCluster

        return RayCluster(self, cores, models)

    @property
    def separates_models(self) -> bool:
        return self.models == "apart"

    @property
    def joined(self) -> bool:
        return self.address is not None

    def on_gpus(self) -> bool | None:
        if self.gpus_per_rank is not None:
            return self.gpus_per_rank > 0
        if self.address is None:
            return None
        from whet.cluster.ray_connection import has_gpus

        return has_gpus(self.address)

    def problems(self, ranks: int) -> Iterator[str]:
        """Yield the reasons why it can't run learners with ``ranks`` workers."""
        yield from super().problems(ranks)
        for name in sorted(self.runtime_env.keys() - set(WORKERS)):
            hint = f"{did_you_mean(name, WORKERS)} Known: {', '.join(WORKERS)}"
            yield f"cluster.runtime_env: {name!r} is not a worker.{hint}"


class DevicesConfig(Config):
    """The division of this machine's cores and GPUs between learners and generator, and their price."""

    placement: Literal["split", "colocated"] = "split"
    """``split``: learners and generator compute concurrently. ``colocated``: they take turns on the same devices; while
    one computes, the other sleeps and, on a GPU, has freed its memory."""
    learner_cores: int | None = Field(None, ge=1)
    """With ``split``, and ``cluster=processes`` or ``ray``: number of this machine's cores to which the learners are
    bound. None: the cores without ``generator_cores``, or all."""
    generator_cores: int | None = Field(None, ge=1)
    """The same for the generator. None: the cores without ``learner_cores``, or all."""
    deadline: float = Field(600.0, gt=0)
    """With ``colocated``: seconds that one may wait for the other, and for falling asleep and waking."""
    cost_per_hour: float | None = Field(None, ge=0)
    """The price of one device for an hour, in any currency, for the metric ``time/cost``. A device is a GPU; without
    GPUs, the machine."""

    def problems(self, cluster: ClusterConfig, samples: bool) -> Iterator[str]:
        """Yield conflicts with the rest of a recipe. ``samples``: the recipe has a generator."""
        cores = self.learner_cores is not None or self.generator_cores is not None
        if self.placement == "colocated" and not samples:
            yield "devices.placement = colocated: this algorithm has no generator to take turns with"
        if self.placement == "colocated" and cores:
            yield (
                "devices.learner_cores and generator_cores divide the machine, but devices.placement = colocated gives "
                "all of it to each in turn; leave them out"
            )
        if cores and not cluster.has_processes:
            yield (
                "devices.learner_cores and generator_cores bind processes to cores, but with cluster = local learners "
                "have no separate processes; set cluster=processes or cluster=ray"
            )
