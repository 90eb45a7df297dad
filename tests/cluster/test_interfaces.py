"""Ranks communicate over the network interface that leads to their rendezvous."""

import os

import psutil
import pytest

from tests.contracts.cluster_contract import Counter, CounterConfig
from whet.cluster.base import RankInfo
from whet.cluster.host import Host, interface_to

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_each_address_has_its_interface() -> None:
    assert psutil.net_if_addrs()[interface_to("127.0.0.1") or ""]
    assert interface_to("127.0.0.2") == interface_to("127.0.0.1")  # any loopback address
    addresses = [
        (name, a.address) for name, all_ in psutil.net_if_addrs().items() for a in all_ if a.family.name == "AF_INET"
    ]
    assert addresses
    for name, address in addresses:
        assert interface_to(address) == name
    assert interface_to("") is None
    assert interface_to("no address") is None


@pytest.mark.parametrize("chosen", [None, "ib0"])
def test_a_worker_sets_the_interface_unless_the_user_did(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
        if chosen:
            monkeypatch.setenv(name, chosen)
    Host().build(Counter, CounterConfig(), RankInfo(rendezvous="127.0.0.1:1"))
    lo = interface_to("127.0.0.1")
    assert [os.environ[name] for name in NAMES] == ([chosen, chosen] if chosen else [lo, f"={lo}"])
