"""Which address gloo would give away, and what is wrong with it."""

from __future__ import annotations

import socket

import pytest

from verl.preflight import network as network_module
from verl.preflight.network import Network, listen, network, unreached

ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"], "ib0": ["192.168.9.7", "192.168.9.8"], "down0": []}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Interfaces and names of a machine on paper; the way to rank 0 leads through eth0."""
    names = {socket.gethostname(): "10.0.0.7", "node1": "10.0.0.1"}
    monkeypatch.setattr(network_module, "interfaces", lambda: ADDRESSES)
    monkeypatch.setattr(network_module, "_resolve", names.get)
    monkeypatch.setattr(network_module, "_route", lambda host: "10.0.0.7")
    monkeypatch.setattr(network_module, "_stack", lambda: "")
    return names


def test_by_the_host_name() -> None:
    assert network({"MASTER_ADDR": "node1"}) == Network("eth0", "10.0.0.7", None, "eth0")
    assert network({}).fault is None


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("127.0.0.1", "lo 127.0.0.1, which is this node's alone"),
        ("127.0.1.1", "lo 127.0.1.1, which is this node's alone"),
        ("10.9.9.9", "the host name is no address of this node"),
        (None, "the host name is no address of this node"),
    ],
)
def test_a_host_name_that_leads_nowhere(address: str | None, fault: str, machine: dict[str, str]) -> None:
    if address is None:
        del machine[socket.gethostname()]
    else:
        machine[socket.gethostname()] = address
    assert network({}).fault == fault


@pytest.mark.parametrize(
    ("asked", "interface", "address", "fault"),
    [
        ("ib0", "ib0", "192.168.9.7", None),
        ("ib0,eth0", "ib0", "192.168.9.7", None),
        ("lo", "lo", "127.0.0.1", "lo 127.0.0.1, which is this node's alone"),
        ("down0", "down0", None, "down0 has no address"),
        ("ib7", None, None, "GLOO_SOCKET_IFNAME=ib7, and there is no such interface"),
    ],
)
def test_by_the_variable(asked: str, interface: str | None, address: str | None, fault: str | None) -> None:
    found = network({"GLOO_SOCKET_IFNAME": asked})
    assert (found.interface, found.address, found.fault) == (interface, address, fault)


def test_link_local() -> None:
    assert Network("eth1", "169.254.1.2", None, "eth0").fault == "eth1 169.254.1.2, which is link-local"


def test_who_listens_is_reached_and_who_does_not_is_named() -> None:
    server, gone = listen("127.0.0.1"), listen("127.0.0.1")
    assert server is not None and gone is not None and listen("10.255.255.1") is None and listen(None) is None
    peers = {1: server.getsockname(), 2: gone.getsockname()}
    gone.close()
    with server:
        assert unreached(peers) == {2: "127.0.0.1: Connection refused"}
