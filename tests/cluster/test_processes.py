"""Workers in processes keep the contract, and their faults are named and handled."""

import asyncio
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from tests.cluster.workers import alive
from tests.contracts.cluster_contract import ClusterContract, Counter, CounterConfig
from tests.contracts.fault_contract import FaultContract, eventually
from whet.base.errors import WhetError
from whet.cluster.base import Cluster, Placement, RankInfo
from whet.cluster.host import Host
from whet.cluster.message import packed
from whet.cluster.processes import ProcessCluster
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import join


@pytest.mark.usefixtures("forked_children")
class TestProcessCluster(ClusterContract, FaultContract):
    @pytest.fixture
    def cluster(self) -> Cluster:
        return ProcessCluster()


@pytest.mark.parametrize(
    "state", [*(pytest.param(state, marks=pytest.mark.slow) for state in ("idle", "frozen")), "busy"]
)
def test_workers_end_when_their_parent_is_killed_and_the_next_start_removes_its_folder(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    script = f"""
        import asyncio, os, signal
        from tests.contracts.cluster_contract import Counter, CounterConfig
        from whet.cluster.base import Placement
        from whet.cluster.processes import ProcessCluster

        async def main():
            group = ProcessCluster().launch(Counter, CounterConfig(), Placement(ranks=2))
            pids = [pid for pid, _ in await group.call("thread")]
            call = asyncio.create_task(group.call("add", 1, 600.0)) if "{state}" == "busy" else None
            if "{state}" == "frozen":
                os.kill(pids[0], signal.SIGSTOP)
            await asyncio.sleep(0.3)
            print(group._ranks[0]._link._meeting[1].path, *pids, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        store, *words = parent.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, pids)))
    (left,) = tmp_path.iterdir()
    assert left == Path(store).parent

    async def start_and_close() -> None:
        group = ProcessCluster().launch(Unable, CounterConfig(), Placement(ranks=2))
        with pytest.raises(ValueError, match="unable"):
            await group.call("thread")
        assert left not in tmp_path.iterdir()
        await group.close()

    asyncio.run(start_and_close())
    assert not list(tmp_path.iterdir())


class Unable(Counter):
    """A worker that can't be built."""

    def __init__(self, config: CounterConfig, info: RankInfo) -> None:
        raise ValueError("unable")


def test_a_worker_that_no_other_process_can_import_is_refused() -> None:
    class Hidden: ...

    with pytest.raises(WhetError, match=r"can't import .*Hidden"):
        ProcessCluster().launch(Hidden, CounterConfig(), Placement())


@pytest.mark.usefixtures("forked_children")
def test_a_group_closed_while_it_is_built_ends_its_processes() -> None:
    from tests.cluster.workers import Choir

    async def run() -> list[int]:
        group = ProcessCluster().launch(Choir, CounterConfig(), Placement(ranks=2))
        pids = [rank._link._child.process.pid for rank in group._ranks]
        await group.close()
        return pids

    assert not any(map(alive, asyncio.run(run())))


def test_more_processes_than_a_machine_can_have_are_refused_before_the_first() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(
        WhetError, match=r"100000 ranks of Counter need one process each, but this machine .* limited to"
    ):
        ProcessCluster().launch(Counter, CounterConfig(), Placement(ranks=100_000))
    assert not set(psutil.Process().children()) - before


class Listener:
    """Meets the other ranks and reports the ports at which its process listens."""

    def __init__(self, config: CounterConfig, info: RankInfo) -> None:
        self.store = info.store
        self.ranks = join(ParallelConfig(fsdp=2), info, torch.device("cpu"), 60.0)

    def met(self) -> tuple[float, str]:
        return float(self.ranks.sum(torch.ones(1))), self.store

    def close(self) -> None:
        self.ranks.destroy()


@pytest.mark.usefixtures("forked_children")
def test_ranks_of_a_machine_meet_in_a_file_that_only_this_user_can_open() -> None:
    async def run() -> list[tuple[float, str]]:
        group = ProcessCluster().launch(Listener, CounterConfig(), Placement(ranks=2))
        try:
            results: list[tuple[float, str]] = await group.call("met")
            assert Path(results[0][1]).parent.stat().st_mode & 0o777 == 0o700
            return results
        finally:
            await group.close()

    (first, file), (second, _) = asyncio.run(run())
    assert (first, second) == (2.0, 2.0)
    assert not Path(file).parent.exists()


def test_of_the_ranks_of_a_shard_only_the_first_sends_its_result() -> None:
    sizes = []
    for rank in range(4):
        host = Host()
        host(bytearray().join(packed((Counter, CounterConfig(), RankInfo(rank, 4, shard=rank // 2, shards=2)))))
        answer = [host(bytearray().join(packed(("add", (5,), of_shard)))) for of_shard in (True, False)]
        sizes.append([pickle.loads(reply).result(rank) for reply in answer])
    assert [each[0] is None for each in sizes] == [False, True, False, True]
    assert all(each[1] is not None for each in sizes)
