"""Workers of the cluster tests that meet each other, die, freeze and fail."""

import logging
import os
import signal
import threading
from datetime import timedelta

from tests.contracts.cluster_contract import Counter, CounterConfig
from whet.cluster.base import RankInfo


class Choir(Counter):
    """Workers that sum over their ranks through torch.distributed."""

    def __init__(self, config: CounterConfig, info: RankInfo) -> None:
        import torch.distributed

        super().__init__(config, info)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{info.rendezvous}",
            rank=info.rank,
            world_size=info.ranks,
            timeout=timedelta(seconds=60),
        )

    def total(self, number: float) -> float:
        """Return the sum of ``number`` plus the rank, over all ranks."""
        import torch

        tensor = torch.tensor(number + self.info.rank)
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def total_unless(self, rank: int, how: str) -> float:
        """The same, but one rank does not take part: it ``dies``, ``freezes`` or ``fails``."""
        if self.info.rank == rank:
            if how == "fails":
                raise Stubborn("out of", "luck")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return self.total(0.0)

    def follow(self, rank: int = -1) -> int:
        """Sum with the first rank until it ends; return how often. One ``rank`` dies before the second sum."""
        count = 0
        while self._broadcast(True):
            if count and self.info.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            self.total(0.0)
            count += 1
        return count

    def sum(self, fails: bool = False) -> float:
        """On the first rank: the sum of all ranks that ``follow``."""
        self._broadcast(True)
        total = self.total(0.0)
        if fails:
            raise Stubborn("out of", "luck")
        return total

    def end(self) -> None:
        self._broadcast(False)

    def _broadcast(self, value: bool) -> bool:
        import torch

        tensor = torch.tensor(int(value))
        torch.distributed.broadcast(tensor, 0)
        return bool(tensor)


class Talker(Counter):
    """Reports on its process."""

    def warn(self) -> None:
        logging.getLogger("whet.somewhere").warning("%s is %d", "it", self.info.rank)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def niceness(self) -> int:
        return os.nice(0)

    def unpicklable(self) -> object:
        return threading.Lock()


class Stubborn(Exception):
    """An exception that can be pickled, but not unpickled: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
