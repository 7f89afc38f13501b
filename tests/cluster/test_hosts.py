"""The hosts that the tests of this folder run on are what real ones are to a program, and go without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import NETWORK, Host, hosts, requires_hosts
from tests.support.jobs import ROOT, wait_until

pytestmark = [pytest.mark.cluster, requires_hosts]

ECHO = """
import socket
with socket.create_server(("{address}", 5000)) as server:
    print("listening", flush=True)
    connection, peer = server.accept()
    print(peer[0], flush=True)
    connection.sendall(connection.recv(100))
    connection.recv(1)
"""
CALL = """
import socket
with socket.create_connection((socket.gethostbyname("node1"), 5000), timeout=100) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode(), flush=True)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def test_each_has_its_own_name_address_processes_memory_and_disk(pair: list[Host]) -> None:
    node1, node2 = pair
    assert [host.run("hostname").strip() for host in pair] == ["node1", "node2"]
    for number, host in enumerate(pair, start=1):
        assert f"{NETWORK}.{number}/24" in host.run("ip", "-4", "address", "show", "dev", "eth0")
        assert host.run("ip", "-o", "link").count("\n") == 2, "lo and eth0"
        assert host.run("getent", "hosts", "node2").split() == [f"{NETWORK}.2", "node2"]
        assert host.run("df", "--output=size", "--block-size=1M", "/dev/shm").split()[-1] == "1024"
    node1.run("touch", "/dev/shm/mine", node1.local / "mine", node1.shared / "ours")
    assert node2.run("ls", "/dev/shm", node2.local, node2.shared).split() == [
        "/dev/shm:", f"{node2.local}:", "tmp", f"{node2.shared}:", "ours",
    ]  # fmt: skip
    assert (node1.disk / "mine").exists() and not (node2.disk / "mine").exists()
    assert not Path("/dev/shm/mine").exists()
    assert "sleep" not in node1.run("ps", "-e", "-o", "comm=") and "cat" in node1.run("ps", "-e", "-o", "comm=")


def test_they_speak_with_each_other_by_name(pair: list[Host]) -> None:
    node1, node2 = pair
    server = node1.start([sys.executable, "-c", ECHO.format(address=node1.address)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    assert node2.run(sys.executable, "-c", CALL) == "hello\n"
    assert server.stdout.readline() == f"{node2.address}\n"
    assert server.wait(100) == 0
    server.stdout.close()


def test_what_is_sent_after_the_cable_is_pulled_is_lost(pair: list[Host]) -> None:
    node1, node2 = pair
    code = f"import socket; socket.create_connection(('{node1.address}', 5001), timeout=1)"

    def end() -> str:
        calling = node2.start([sys.executable, "-c", code], stderr=subprocess.PIPE)
        return calling.communicate(timeout=100)[1].strip().rpartition("\n")[2]

    assert end().startswith("ConnectionRefusedError")
    node2.link_down()
    try:
        assert end() == "TimeoutError: timed out"
    finally:
        node2.link_up()
    wait_until(lambda: end().startswith("ConnectionRefusedError"), 100, lambda: "no link again")


def test_a_signal_reaches_the_command_and_its_exit_code_comes_back(pair: list[Host]) -> None:
    node1, _ = pair
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('on', flush=True); time.sleep(99)"
    )
    process = node1.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    assert len(node1.processes()) == 1
    node1.signal(process, signal.SIGTERM)
    assert process.wait(100) == 7
    process.stdout.close()
    assert node1.processes() == []


def test_orphans_are_taken_away_when_they_end(pair: list[Host]) -> None:
    node1, _ = pair
    node1.run("sh", "-c", "(sleep 0.2 &)")
    time.sleep(0.5)
    assert "defunct" not in node1.run("ps", "-e", "-o", "args=")


def machine() -> tuple[list[str], str]:
    """Network interfaces and mounts of this machine itself."""
    return sorted(os.listdir("/sys/class/net")), Path("/proc/self/mounts").read_text()


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    before = machine()
    with hosts(2, tmp_path) as (node1, node2):
        for host in (node1, node2):
            host.start(["sh", "-c", "setsid sleep 1000 & trap '' TERM INT HUP; sleep 1000"])
        wait_until(lambda: all(len(host.processes()) == 3 for host in (node1, node2)), 100, lambda: "not started")
        there = [*node1.processes(), *node2.processes()]
        assert machine() == before
    assert not [process for process in there if process.is_running()]
    assert machine() == before


KILLED = """
import pathlib, sys, time
from tests.support.hosts import hosts
with hosts(2, pathlib.Path(sys.argv[1])) as (node1, node2):
    node1.start(["sleep", "1000"])
    while not node1.processes():
        time.sleep(0.02)
    print(node1.processes()[0].pid, flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    before = machine()
    tests = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    pid = int(tests.stdout.readline())
    tests.kill()
    tests.wait()
    tests.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 100, lambda: f"process {pid} is left")
    assert machine() == before
