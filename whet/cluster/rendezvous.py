"""The rendezvous of the ranks of a group: a port that stays reserved until rank 0 listens on it, or a private file."""

import socket

from whet.base.scratch import Scratch
from whet.cluster.base import Placement, RankInfo

LOOPBACK = "127.0.0.1"


def local_address(host: str) -> str:
    """Return this machine's address in its network towards ``host``. Raises ``OSError`` if ``host`` is unreachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, 9))  # for a datagram socket this sends nothing, but selects the local address
        address: str = towards.getsockname()[0]
    return address


class Reservation:
    """A free port at an address of this machine that stays reserved while this object lives.

    The socket is bound with SO_REUSEADDR but does not listen, so a server that also sets SO_REUSEADDR, as
    ``whet.parallel`` does, can listen on the same port (Linux; elsewhere the port is only free at first).
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def __del__(self) -> None:
        self._socket.close()


class PrivateFile:
    """A file where the ranks of one machine meet. Only this user can open it, while any user of the machine could
    connect to a port. Removed by ``remove``, or with this object."""

    def __init__(self) -> None:
        self._scratch = Scratch("ranks")
        self.path, self.remove = str(self._scratch.path / "store"), self._scratch.remove


def rank_infos(placement: Placement, rendezvous: str, store: str = "") -> list[RankInfo]:
    """Return the info of each rank."""
    return [
        RankInfo(rank, placement.ranks, rank // placement.ranks_per_shard, placement.shards, rendezvous, store=store)
        for rank in range(placement.ranks)
    ]
