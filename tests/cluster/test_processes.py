"""Workers in processes keep the contract, and their faults have names and ends."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.cluster.workers import alive
from tests.contracts.cluster_contract import ClusterContract, CounterConfig
from tests.contracts.fault_contract import FaultContract, eventually
from whet.cluster.base import Cluster, Placement
from whet.cluster.processes import ProcessCluster
from whet.errors import WhetError


class TestProcessCluster(ClusterContract, FaultContract):
    @pytest.fixture
    def cluster(self) -> Cluster:
        return ProcessCluster()


@pytest.mark.parametrize("state", ["idle", "busy", "frozen"])
def test_workers_end_when_their_parent_is_killed(state: str) -> None:
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
            print(*pids, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, pids)))


def test_a_worker_that_no_other_process_can_import_is_refused() -> None:
    class Hidden: ...

    with pytest.raises(WhetError, match=r"can't import .*Hidden"):
        ProcessCluster().launch(Hidden, CounterConfig(), Placement())


def test_a_group_closed_while_it_is_built_leaves_nothing() -> None:
    from tests.cluster.workers import Choir

    async def run() -> list[int]:
        group = ProcessCluster().launch(Choir, CounterConfig(), Placement(ranks=2))
        pids = [rank._link._child.process.pid for rank in group._ranks]
        await group.close()
        return pids

    assert not any(map(alive, asyncio.run(run())))
