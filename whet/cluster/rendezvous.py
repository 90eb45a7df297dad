"""Where the ranks of a group meet: a port that nobody else takes before rank 0 listens there."""

import socket
import tempfile
from pathlib import Path

from whet.cluster.base import Placement, RankInfo

LOOPBACK = "127.0.0.1"


def own_address(host: str) -> str:
    """The address by which this machine reaches ``host``, or itself. Raises ``OSError`` where it can't."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, 9))  # of a datagram socket: sends nothing, chooses the address to send from
        address: str = towards.getsockname()[0]
    return address


class Reservation:
    """A free port at an address of this machine, which the system gives to nobody else while this object lives.

    The socket is bound but does not listen, and allows its address to be used again: so a server that allows that too,
    as ``whet.parallel`` does, can listen on the same port (Linux; elsewhere the port is merely free to begin with).
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def __del__(self) -> None:
        self._socket.close()


class PrivateFile:
    """A file where the ranks of one machine meet. Only this user can open it, while everybody on the machine could
    connect to a port. It lives as long as this object."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whet-ranks-")  # mode 0700
        self.path = str(Path(self._folder.name) / "store")


def rank_infos(placement: Placement, rendezvous: str, store: str = "") -> list[RankInfo]:
    """Return the info of each rank."""
    return [
        RankInfo(rank, placement.ranks, rank // placement.ranks_per_shard, placement.shards, rendezvous, store=store)
        for rank in range(placement.ranks)
    ]
