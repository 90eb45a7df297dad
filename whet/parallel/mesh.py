"""The ranks of one learner: process groups, the device mesh, and collectives on objects. Every wait has a deadline.

Ranks are numbered with ``tensor`` fastest, then ``pipeline``, ``context``, ``fsdp`` and ``replicas``, so ranks with the
same data are contiguous, as in a ``Placement``. Independent of the model.
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

from whet.base.errors import WhetError
from whet.cluster.base import RankInfo
from whet.parallel.config import ParallelConfig

try:
    from torch.distributed import set_timeout  # type: ignore[attr-defined]
except ImportError:  # before torch 2.14
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

T = TypeVar("T")
R = TypeVar("R", bound="Ranks")


@dataclass(slots=True)
class Ranks:
    """The ranks of one learner, from the view of one rank."""

    config: ParallelConfig
    info: RankInfo
    device: torch.device
    parameters: DeviceMesh  # [replicas,] shards (fsdp x context) [, tensor]: the layout of parameters
    context: dist.ProcessGroup  # the ranks that split a micro-batch's tokens
    pipeline: dist.ProcessGroup  # the ranks through which a micro-batch passes, in order
    messages: dist.ProcessGroup  # all ranks, on the CPU
    background: dist.ProcessGroup  # all ranks, for collectives that run in parallel with training
    owns_process_group: bool
    timeout: timedelta
    _experts: dict[int, DeviceMesh] = field(default_factory=dict)

    @property
    def data(self) -> DeviceMesh:
        """The dimensions over which a parameter is sharded and gradients are summed."""
        return self.parameters["replicas", "shards"] if self.config.replicas > 1 else self.parameters["shards"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that split every matrix."""
        return self.parameters["tensor"]

    def experts(self, parts: int) -> DeviceMesh:
        """Return the mesh of experts that are split over ``parts`` neighbouring ranks: [replicas,] copies [, expert],
        where ``copies`` is the remaining dimension of a replica. The first call is collective."""
        if parts not in self._experts:
            config, names = self.config, ("replicas", "copies", "expert", "pipeline")
            ranks = torch.arange(config.ranks).view(config.replicas, -1, config.pipeline, config.tensor).mT
            ranks = ranks.reshape(config.replicas, -1, parts, config.pipeline)
            self._experts[parts] = _mesh(self.parameters.device_type, ranks, names, self.timeout)
        return self._experts[parts]

    @property
    def is_shard_leader(self) -> bool:
        """True on the first of the ranks that work on the same data."""
        return self.info.rank % self.config.ranks_per_shard == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, bit-identical on each rank."""
        values = values.to(self.device, copy=True)
        dist.all_reduce(values)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[T] = [value] * self.info.ranks
        dist.all_gather_object(values, value, self.messages)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.messages)
        return values[0]

    @contextmanager
    def fail_together(self, doing: str) -> Iterator[None]:
        """Have the block, which must not contain collectives, fail on all ranks or on none.

        A failing rank raises its error; the other ranks raise ``WhetError`` with the rank and its error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        errors = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise WhetError(f"rank {rank} failed while {doing}: {message}")

    def destroy(self) -> None:
        """Destroy the process group, if it was created by this learner."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def fail_together(ranks: Ranks | None, doing: str) -> AbstractContextManager[None]:
    """Return ``Ranks.fail_together``, or a context that does nothing for a single rank."""
    return nullcontext() if ranks is None else ranks.fail_together(doing)


def join(config: ParallelConfig, info: RankInfo, device: torch.device, deadline: float) -> Ranks:
    """Meet the other ranks at ``info.rendezvous``. An existing process group (several learners in the same processes)
    is reused. Collectives that take longer than ``deadline`` seconds raise.

    Raises ``WhetError`` if the sizes do not match ``info``, other ranks are missing, or two ranks have the same GPU.
    """
    if config.ranks != info.ranks or config.ranks_per_shard * info.shards != info.ranks:
        raise WhetError(
            f"parallel: {config.replicas} replicas x {config.fsdp} fsdp x {config.context} context x "
            f"{config.pipeline} pipeline x {config.tensor} tensor are {config.ranks} ranks, {config.ranks_per_shard} "
            f"per data-parallel rank, but the learner was placed on {info.ranks} ranks, {info.shards} data-parallel"
        )
    timeout, owns = timedelta(seconds=deadline), not dist.is_initialized()
    if owns:
        _meet(info, device, timeout)
    elif dist.get_world_size() != info.ranks:
        raise WhetError(f"this process already is in a group of {dist.get_world_size()} ranks, not of {info.ranks}")
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
    """Build the meshes and groups of ranks that have met."""
    where = "cpu" if device.type == "meta" else device.type
    numbers = torch.arange(config.ranks)
    sizes = (config.replicas, config.fsdp * config.context, config.pipeline, config.tensor)
    parameters = _mesh(where, numbers.view(sizes), ("replicas", "shards", "pipeline", "tensor"), timeout)
    work = (config.replicas * config.fsdp, config.context, config.pipeline, config.tensor)
    working = DeviceMesh(where, numbers.view(work), mesh_dim_names=("data", "context", "pipeline", "tensor"))
    for group in working.get_all_groups():
        set_timeout(timeout, group)
    groups = (working.get_group("context"), working.get_group("pipeline"), messages, background)
    return kind(config, info, device, parameters, *groups, owns, timeout)


def _mesh(where: str, ranks: Tensor, names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    """Return the mesh of the ranks with this rank's layers, with the dimensions that are larger than 1, and always the
    second one."""
    kept = [dim for dim, size in enumerate(ranks.shape) if size > 1 or dim == 1]
    kept_names = [names[dim] for dim in kept]
    mesh = DeviceMesh(where, ranks.view([ranks.shape[dim] for dim in kept]), mesh_dim_names=tuple(kept_names))
    for group in mesh.get_all_groups():
        set_timeout(timeout, group)  # a mesh creates its groups with torch's default timeout
    return mesh[tuple(name for name in kept_names if name != "pipeline")]  # other stages have other parameters


def device_id(device: torch.device) -> str:
    """Return an id of the device that is the same in every process: one for each GPU, one for all CPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def check_devices(devices: Sequence[str]) -> None:
    """Raise ``WhetError`` if two ranks have the same GPU. ``devices``: the device ids of all ranks, by rank."""
    for rank, device in enumerate(devices):
        if (first := devices.index(device)) != rank:
            raise WhetError(
                f"ranks {first} and {rank} of {len(devices)} have the same GPU ({device}), but each rank needs a "
                f"separate one. The ranks have {len(set(devices))} GPUs; lower the sizes of parallel, use more nodes, "
                "or with cluster=ray set cluster.gpus_per_rank=1"
            )


def _meet(info: RankInfo, device: torch.device, timeout: timedelta) -> None:
    backend, bound = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    try:
        store = _store(info, timeout)
        if bound is not None:  # before NCCL, whose error for a shared GPU is less clear
            store.set(f"gpu of {info.rank}", device_id(device))
            check_devices([store.get(f"gpu of {rank}").decode() for rank in range(info.ranks)])
        # With a bound GPU, NCCL connects here, and the groups of a mesh are split from this one.
        dist.init_process_group(
            backend, store=store, rank=info.rank, world_size=info.ranks, timeout=timeout, device_id=bound
        )
    except (dist.DistError, OSError) as error:
        raise WhetError(
            f"rank {info.rank} did not meet the other {info.ranks - 1} ranks at {info.store or info.rendezvous} within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error


def _store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """Return the store through which ranks exchange addresses: a private file, or a port of rank 0."""
    if info.store:
        file = dist.FileStore(info.store, info.ranks)
        file.set_timeout(timeout)
        return file
    host, _, port = info.rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise WhetError(
            f"a learner of {info.ranks} ranks needs one process per rank and a rendezvous, but the rendezvous is "
            f"{info.rendezvous or 'missing'}; use a cluster of processes, or set every size of parallel to 1"
        )
    listening = _listen(host, int(port)) if info.rank == 0 else None
    return dist.TCPStore(host, int(port), info.ranks, info.rank == 0, timeout, master_listen_fd=listening)


def _listen(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens at this address only, for torch, which would listen on all
    interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the reservation is bound to the same port
        listening.bind((host, port))
        listening.listen(2048)
        return listening.detach()
