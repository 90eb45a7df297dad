"""Ranks decide alike, fail together, and never wait indefinitely."""

from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.contracts.fault_contract import eventually
from tests.learner.parts import PolicyGradient
from tests.parallel.cases import Case, build, build_errors
from tests.parallel.ranks import info_of, on_ranks
from tests.parallel.skipping import assert_skipped, poisoned, skip
from whet.base.errors import WhetError
from whet.cluster.local import LocalCluster
from whet.cluster.rendezvous import LOOPBACK, Reservation
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.dump import read_dump
from whet.learner.learner import WorkerLearner
from whet.learner.worker import LearnerWorker
from whet.models.config import ModelConfig
from whet.parallel import mesh
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import Ranks, check_devices, join

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_is_bad_on_one_of_them(models, tmp_path):
    case = Case(models["qwen"], {"fsdp": 2, "tensor": 2})
    assert_skipped(on_ranks(4, skip, case, tmp_path), case)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-000001-001-shard-{i}" for i in (0, 1)]
    dumped = [micro for path in tmp_path.iterdir() for micro in read_dump(path)[0]]
    assert sum(bool(micro.batch.weight.isnan().any()) for micro in dumped) == 1


def fail_three_times(rendezvous: str, rank: int, case: Case, dumps: Path) -> str:
    worker = build(case, rendezvous, rank)
    worker.config = worker.config.model_copy(update={"dumps": dumps})
    bad = poisoned(case, worker, 0)
    worker.update(bad, PolicyGradient())
    worker.update(bad, PolicyGradient())
    with pytest.raises(WhetError) as caught:
        worker.update(bad, PolicyGradient())
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "names"),
    [("fsdp", ["-shard-0", "-shard-1"]), pytest.param("tensor", ["", ""], marks=pytest.mark.slow)],
)
def test_all_ranks_end_the_run_after_too_many_bad_steps_and_name_the_dumped_batch(models, tmp_path, layout, names):
    messages = on_ranks(2, fail_three_times, Case(models["llama"], {layout: 2}), tmp_path)
    for message, name in zip(messages, names, strict=True):
        folder = tmp_path / f"step-000000-003{name}"
        assert "3 optimizer steps in a row" in message
        assert f"its batch is in {folder}." in message
        assert read_dump(folder)[0]


def test_a_model_that_cannot_be_split_is_refused_on_every_rank(models, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

    from tests.learner.parts import save_model

    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **small))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, **small))
    cases = [
        Case(save_model(tmp_path / "mamba", mamba), {"context": 2}),
        Case(save_model(tmp_path / "gpt2", gpt2), {"tensor": 2}),
        Case(tmp_path / "nothing", {"fsdp": 2}),
    ]
    for messages in on_ranks(2, build_errors, cases):
        assert "other than plain attention" in messages[0]
        assert "transformers has no plan" in messages[1]
        assert "nothing" in messages[2]
    odd = [Case(models["llama"], {"tensor": 4})]
    assert all("does not divide num_key_value_heads = 2" in messages[0] for messages in on_ranks(4, build_errors, odd))


def fail_on_rank_1(rendezvous: str, rank: int) -> str:
    ranks = join(ParallelConfig(fsdp=2), info_of(rendezvous, rank, 2, 1), CPU, 30.0)
    try:
        with ranks.fail_together("counting"):
            if rank == 1:
                raise KeyError("seven")
    except (KeyError, WhetError) as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def test_an_error_on_one_rank_is_raised_on_all_with_its_rank(models):
    assert on_ranks(2, fail_on_rank_1) == [
        "WhetError rank 1 failed while counting: KeyError: 'seven'",
        "KeyError 'seven'",
    ]


def listening(rendezvous: str, rank: int) -> list[str]:
    """Return the addresses at which this process listens while the ranks are connected."""
    ranks = join(ParallelConfig(fsdp=2), info_of(rendezvous, rank, 2, 1), CPU, 30.0)
    ranks.sum(torch.ones(1))
    addresses = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    ranks.sum(torch.ones(1))  # no rank disconnects before the other has looked
    return addresses


def test_ranks_on_one_machine_listen_on_loopback_only():
    addresses = on_ranks(2, listening)
    assert addresses[0]  # the rendezvous
    assert {address for rank in addresses for address in rank} == {"127.0.0.1"}


def test_two_ranks_with_one_gpu_are_refused():
    check_devices(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(WhetError, match=r"ranks 0 and 2 of 4 have the same GPU \(GPU-a\).* The ranks have 2 GPUs"):
        check_devices(["GPU-a", "GPU-b", "GPU-a", "GPU-b"])


class FakeStore(dict):
    """A store with the devices of all ranks."""

    def set(self, name, value):
        self[name] = value.encode()

    def get(self, name):
        return self[name]


def test_each_rank_of_a_gpu_group_is_bound_to_its_gpu(monkeypatch):
    calls, store = [], FakeStore({"gpu of 0": b"GPU-a", "gpu of 1": b"GPU-b"})
    monkeypatch.setattr(mesh.dist, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda *args, **settings: calls.append((args, settings)))
    monkeypatch.setattr(mesh, "device_id", lambda device: f"GPU-{'abc'[device.index]}")
    meet = mesh._meet
    meet(info_of("127.0.0.1:1", 1, 2, 2), torch.device("cuda", 1), timedelta(seconds=9))
    ((backend,), settings) = calls[0]
    assert backend == "cpu:gloo,cuda:nccl"
    assert settings["device_id"] == torch.device("cuda", 1)
    with pytest.raises(WhetError, match="ranks 0 and 1 of 2 have the same GPU"):
        meet(info_of("127.0.0.1:1", 1, 2, 2), torch.device("cuda", 0), timedelta(seconds=9))
    assert len(calls) == 1, "refused before a process group is created"
    meet(info_of("127.0.0.1:1", 1, 2, 2), CPU, timedelta(seconds=9))
    assert calls[1][0] == ("gloo",)
    assert calls[1][1]["device_id"] is None


def come_together(folder: Path, rank: int, ranks: int) -> None:
    """Wait until all ranks have started, so that they meet within a short deadline."""
    (folder / f"rank {rank}").touch()
    assert eventually(lambda: len(list(folder.glob("rank *"))) == ranks, 200)


def time_out_in_a_mesh(rendezvous: str, rank: int, given_up: Path) -> None:
    """Collectives of the mesh's groups raise at the deadline, too."""
    come_together(given_up.parent, rank, 4)
    ranks = join(ParallelConfig(fsdp=2, tensor=2), info_of(rendezvous, rank, 4, 2), CPU, 5.0)
    if rank == 0:
        for group in (ranks.data.get_group(), ranks.tensor.get_group()):
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=group)
        given_up.touch()
    else:
        assert eventually(given_up.exists, 200)  # alive, but not in the collective


@pytest.mark.slow
def test_a_rank_does_not_wait_indefinitely_for_the_ranks_of_its_mesh(tmp_path):
    on_ranks(4, time_out_in_a_mesh, tmp_path / "given up")


def time_out(rendezvous: str, rank: int, given_up: Path) -> None:
    come_together(given_up.parent, rank, 2)
    ranks = join(ParallelConfig(fsdp=2), info_of(rendezvous, rank, 2, 1), CPU, 4.0)
    if rank == 0:
        with pytest.raises(RuntimeError):
            ranks.sum(torch.ones(1))
        given_up.touch()
    else:
        assert eventually(given_up.exists, 200)  # alive, but not in the collective


def test_a_rank_does_not_wait_indefinitely_for_another(models, tmp_path):
    on_ranks(2, time_out, tmp_path / "given up")


def test_a_rank_that_meets_no_other_rank_raises():
    reserved = Reservation(LOOPBACK)
    with pytest.raises(WhetError, match=f"rank 0 did not meet the other 1 ranks at {reserved.address} within 1 s"):
        join(ParallelConfig(fsdp=2), info_of(reserved.address, 0, 2, 1), CPU, 1.0)


def test_ranks_wait_longer_for_each_other_than_a_call_of_them_may_take(models):
    """Else the error of a rank that waits could come before the controller has found the rank that hangs."""
    learner = LearnerConfig(deadline=1.0)
    model, parallel = ModelConfig(path=str(models["llama"])), ParallelConfig(fsdp=2)
    config = WorkerConfig(model=model, learner=learner, parallel=parallel)
    reserved = Reservation(LOOPBACK)
    with pytest.raises(WhetError, match=rf"did not meet the other 1 ranks at {reserved.address} within 1\.1 s"):
        LearnerWorker(config, info_of(reserved.address, 0, 2, 1))


def test_sizes_must_match_the_placement(models):
    config = WorkerConfig(model=ModelConfig(path=str(models["llama"])), parallel=ParallelConfig(fsdp=2, tensor=2))
    with pytest.raises(
        WhetError, match="2 fsdp x 1 context x 1 pipeline x 2 tensor are 4 ranks, 2 per data-parallel rank"
    ):
        LearnerWorker(config, info_of("127.0.0.1:1", 0, 2, 1))


def test_several_ranks_in_one_process_are_refused(models):
    import asyncio

    config = WorkerConfig(
        model=ModelConfig(path=str(models["llama"])), parallel=ParallelConfig(fsdp=2), learner=LearnerConfig()
    )
    with pytest.raises(WhetError, match="needs one process per rank"):
        asyncio.run(WorkerLearner.launch(LocalCluster(), config))


def test_one_rank_is_the_leader_of_its_shard():
    def ranks(rank: int) -> Ranks:
        made = object.__new__(Ranks)
        made.config, made.info = ParallelConfig(fsdp=2, tensor=2), info_of("", rank, 4, 2)
        return made

    assert [ranks(rank).is_shard_leader for rank in range(4)] == [True, False, True, False]
