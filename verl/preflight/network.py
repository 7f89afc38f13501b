"""Which of this node's addresses gloo will give to the other ranks, and whether they can reach it there."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
REACH_SECONDS = 5.0
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737): the way to it is the default route."""


@dataclass(frozen=True)
class Network:
    interface: str | None
    """The one that gloo binds to. None: there is none such, or the host name leads to no address of this node."""
    address: str | None
    asked: str | None
    """GLOO_SOCKET_IFNAME; None: gloo goes by the host name."""
    toward_others: str | None
    """The interface through which this node reaches rank 0's, or without a job the rest of the world."""
    stack: str = ""
    """Alike on nodes that share all interfaces, the loopback too: several torchruns on one machine. '' is not known."""

    @property
    def fault(self) -> str | None:
        """What other nodes cannot speak to, if so."""
        if self.interface is None:
            if self.asked is not None:
                return f"{GLOO}={self.asked}, and there is no such interface"
            return "the host name is no address of this node"
        if self.address is None:
            return f"{self.interface} has no address"
        address = ipaddress.ip_address(self.address)
        if address.is_loopback:
            return f"{self.interface} {self.address}, which is this node's alone"
        if address.is_link_local:
            return f"{self.interface} {self.address}, which is link-local"
        return None


def network(environ: Mapping[str, str]) -> Network:
    """By torch's rules: the first interface of GLOO_SOCKET_IFNAME, else the address that the host name leads to."""
    addresses = interfaces()
    toward = _interface_of(_route(environ.get("MASTER_ADDR", _ELSEWHERE)), addresses)
    asked = environ.get(GLOO) or None
    if asked is not None:
        name = asked.split(",")[0]
        return Network(
            name if name in addresses else None, next(iter(addresses.get(name, [])), None), asked, toward, _stack()
        )
    address = _resolve(socket.gethostname())
    interface = _interface_of(address, addresses)
    return Network(interface, address if interface else None, None, toward, _stack())


def interfaces() -> dict[str, list[str]]:
    """IPv4 addresses by interface."""
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def listen(address: str | None) -> socket.socket | None:
    """A socket that takes connections for as long as it is open. None where the address cannot be bound."""
    try:
        return socket.create_server((address, 0)) if address else None
    except OSError:  # what is wrong with the address has been found by `Network.fault`
        return None


def unreached(peers: Mapping[int, tuple[str, int]], timeout: float = REACH_SECONDS) -> dict[int, str]:
    """The nodes to whose address and port no connection could be made -> why. One limit for all of them together."""
    deadline = time.monotonic() + timeout
    failed = {}
    for node, (address, port) in peers.items():
        try:
            with socket.create_connection((address, port), timeout=max(0.2, deadline - time.monotonic())):
                pass
        except OSError as error:
            failed[node] = f"{address}: {error.strerror or 'no answer'}"
    return failed


def _stack() -> str:
    """This boot of this kernel, and the network namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/net')}" if boot.exists() else ""


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _route(host: str) -> str | None:
    """This node's address on the way to a host. Nothing is sent."""
    address = _resolve(host)
    if address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _interface_of(address: str | None, addresses: Mapping[str, list[str]]) -> str | None:
    """All of 127.0.0.0/8 is the loopback's, which bears one address of it (Debian gives a host name 127.0.1.1)."""
    if address is not None and _is_loopback(address):
        return next((name for name, those in addresses.items() if any(map(_is_loopback, those))), None)
    return next((name for name, those in addresses.items() if address in those), None)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
