"""The ranks of one learner: process groups, the device mesh, and how ranks agree. Every wait has a deadline.

Ranks are numbered with ``tensor`` fastest, then ``pipeline``, ``context``, ``fsdp`` and ``replicas``. So the ranks that
work on the same data stand side by side, as in a ``Placement``. Knows no model.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from whet.base.errors import WhetError
from whet.cluster.base import RankInfo
from whet.parallel.config import ParallelConfig

T = TypeVar("T")
R = TypeVar("R", bound="Ranks")


@dataclass(slots=True)
class Ranks:
    """The ranks of one learner, as one of them sees them."""

    config: ParallelConfig
    info: RankInfo
    device: torch.device
    parameters: DeviceMesh  # [replicas,] shards (fsdp x context) [, tensor]: how parameters are laid out
    context: dist.ProcessGroup  # the ranks that share a micro-batch's tokens
    pipeline: dist.ProcessGroup  # the ranks through which a micro-batch passes, in this order
    messages: dist.ProcessGroup  # all ranks, on the CPU
    background: dist.ProcessGroup  # the same ranks, for what runs beside training: its collectives must not mix
    owns_process_group: bool
    timeout: timedelta
    _experts: dict[int, DeviceMesh] = field(default_factory=dict)

    @property
    def data(self) -> DeviceMesh:
        """The dimensions over which a parameter is sharded and gradients are summed."""
        return self.parameters["replicas", "shards"] if self.config.replicas > 1 else self.parameters["shards"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share every matrix."""
        return self.parameters["tensor"]

    def experts(self, parts: int) -> DeviceMesh:
        """[replicas,] copies [, expert]: how experts that ``parts`` neighbours share are laid out; the ``copies`` are
        what is left of the ranks of a replica. Every rank must call this when one calls it first."""
        if parts not in self._experts:
            config, names = self.config, ("replicas", "copies", "expert", "pipeline")
            ranks = torch.arange(config.ranks).view(config.replicas, -1, config.pipeline, config.tensor).mT
            ranks = ranks.reshape(config.replicas, -1, parts, config.pipeline)
            self._experts[parts] = _mesh(self.parameters.device_type, ranks, names, self.timeout)
        return self._experts[parts]

    @property
    def speaks_for_shard(self) -> bool:
        """True on the first of the ranks that work on the same data."""
        return self.info.rank % self.config.ranks_per_shard == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks; the same bits on each of them."""
        values = values.to(self.device, copy=True)
        dist.all_reduce(values)
        return values

    def all(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        held: list[T] = [value] * self.info.ranks
        dist.all_gather_object(held, value, self.messages)
        return held

    def first(self, value: T) -> T:
        """Return the first rank's value, on every rank."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.messages)
        return held[0]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Have what is done inside, without collectives, fail on all ranks or on none.

        A rank's own error is raised as it is; the others raise ``WhetError`` that names the rank and its error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        errors = self.all(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise WhetError(f"rank {rank} failed while {doing}: {message}")

    def leave(self) -> None:
        """Let go of the process group, if it was made here."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def together(ranks: Ranks | None, doing: str) -> AbstractContextManager[None]:
    """Return ``Ranks.together``, or a context that does nothing where one rank is alone."""
    return nullcontext() if ranks is None else ranks.together(doing)


def join(config: ParallelConfig, info: RankInfo, device: torch.device, deadline: float) -> Ranks:
    """Meet the other ranks at ``info.rendezvous``. A process whose group is there already (several learners in the same
    processes) stays in it. Collectives that take longer than ``deadline`` seconds raise.

    Raises ``WhetError`` where the sizes are not those of ``info``, nobody else comes, or two ranks have one GPU.
    """
    if config.ranks != info.ranks or config.ranks_per_shard * info.shards != info.ranks:
        raise WhetError(
            f"parallel: {config.replicas} replicas x {config.fsdp} fsdp x {config.context} context x "
            f"{config.pipeline} pipeline x {config.tensor} tensor are {config.ranks} ranks, {config.ranks_per_shard} "
            f"to a shard of the data, but the learner was placed on {info.ranks} ranks with {info.shards} shards"
        )
    timeout, owns = timedelta(seconds=deadline), not dist.is_initialized()
    if owns:
        _meet(info, device, timeout)
    elif dist.get_world_size() != info.ranks:
        raise WhetError(f"this process is in a group of {dist.get_world_size()} ranks already, not of {info.ranks}")
    messages = dist.new_group(backend="gloo", timeout=timeout)
    background = dist.new_group(backend="gloo", timeout=timeout)
    return arrange(Ranks, config, info, device, messages, background, owns, timeout)


def arrange(
    kind: type[R],
    config: ParallelConfig,
    info: RankInfo,
    device: torch.device,
    messages: dist.ProcessGroup,
    background: dist.ProcessGroup,
    owns: bool,
    timeout: timedelta,
) -> R:
    """Lay out ranks that have met."""
    where = "cpu" if device.type == "meta" else device.type
    everybody = torch.arange(config.ranks)
    sizes = (config.replicas, config.fsdp * config.context, config.pipeline, config.tensor)
    parameters = _mesh(where, everybody.view(sizes), ("replicas", "shards", "pipeline", "tensor"), timeout)
    work = (config.replicas * config.fsdp, config.context, config.pipeline, config.tensor)
    working = DeviceMesh(where, everybody.view(work), mesh_dim_names=("data", "context", "pipeline", "tensor"))
    for group in working.get_all_groups():
        _set_pg_timeout(timeout, group)
    groups = (working.get_group("context"), working.get_group("pipeline"), messages, background)
    return kind(config, info, device, parameters, *groups, owns, timeout)


def _mesh(where: str, ranks: Tensor, names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    """Build a mesh of the ranks that have this one's layers, with the dimensions that are larger than 1, and the
    second."""
    kept = [dim for dim, size in enumerate(ranks.shape) if size > 1 or dim == 1]
    found = [names[dim] for dim in kept]
    mesh = DeviceMesh(where, ranks.view([ranks.shape[dim] for dim in kept]), mesh_dim_names=tuple(found))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)  # a mesh makes its groups with torch's own timeouts
    return mesh[tuple(name for name in found if name != "pipeline")]  # other stages have other parameters


def device_id(device: torch.device) -> str:
    """Return an id of the device that is the same in every process: one for each GPU, one for all CPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def check_devices(devices: Sequence[str]) -> None:
    """``devices`` are the ids of the GPUs of all ranks, by rank. Raises ``WhetError`` where two ranks have the same."""
    for rank, device in enumerate(devices):
        if (first := devices.index(device)) != rank:
            raise WhetError(
                f"ranks {first} and {rank} of {len(devices)} have the same GPU ({device}): each rank needs one "
                f"of its own. There are {len(set(devices))} for them; ask for fewer ranks with parallel.*, use more "
                "nodes, or with cluster=ray set cluster.gpus_per_rank=1"
            )


def _meet(info: RankInfo, device: torch.device, timeout: timedelta) -> None:
    backend, bound = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    try:
        store = _store(info, timeout)
        if bound is not None:  # before NCCL, which says less where two ranks have one GPU
            store.set(f"gpu of {info.rank}", device_id(device))
            check_devices([store.get(f"gpu of {rank}").decode() for rank in range(info.ranks)])
        # Bound to its GPU, NCCL connects here, and the groups of a mesh are split off from this one.
        dist.init_process_group(
            backend, store=store, rank=info.rank, world_size=info.ranks, timeout=timeout, device_id=bound
        )
    except (dist.DistError, OSError) as error:
        raise WhetError(
            f"rank {info.rank} did not meet the other {info.ranks - 1} ranks at {info.store or info.rendezvous} within "
            f"{timeout.total_seconds():.0f} s: {error}"
        ) from error


def _store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """Return the store in which ranks find each other's addresses: a private file, or a port of rank 0."""
    if info.store:
        file = dist.FileStore(info.store, info.ranks)
        file.set_timeout(timeout)
        return file
    host, _, port = info.rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise WhetError(
            f"a learner of {info.ranks} ranks needs a process for each and a place to meet, but it was given "
            f"{info.rendezvous or 'none'}; use a cluster of processes, or set every size of parallel to 1"
        )
    listening = _listen(host, int(port)) if info.rank == 0 else None
    return dist.TCPStore(host, int(port), info.ranks, info.rank == 0, timeout, master_listen_fd=listening)


def _listen(host: str, port: int) -> int:
    """Open a socket that listens at this one address, for torch to own: by itself it would listen on all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # beside the reservation
        listening.bind((host, port))
        listening.listen(2048)
        return listening.detach()
