"""What ssh says of nodes, and what we make of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from verl.errors import UserError
from verl.launch.ssh import addresses, not_connected

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


@needs_ssh
def test_an_address_is_what_ssh_would_connect_to(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host node1\n  HostName 10.1.2.3\nHost node2\n  HostName %h.cluster.example\n")
    assert addresses(["node1", "node2", "node3"], str(config)) == {
        "node1": "10.1.2.3",
        "node2": "node2.cluster.example",
        "node3": "node3",
    }


@needs_ssh
def test_a_broken_file_of_ssh_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host node1\n  NoSuchWord yes\n")
    with pytest.raises(UserError, match=r"(?i)nosuchword"):
        addresses(["node1"], str(config))


def test_without_ssh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="install OpenSSH's client"):
        addresses(["node1"], None)


@pytest.mark.parametrize(
    ("code", "said", "remedy"),
    [
        (255, "ssh: Could not resolve hostname n7: Name or service not known", "add n7 to ~/.ssh/config"),
        (255, "Host key verification failed.", "ssh n7"),
        (255, "root@n7: Permission denied (publickey).", "ssh-copy-id n7"),
        (255, "ssh: connect to host n7 port 22: Connection refused", "sshd does not listen"),
        (255, "ssh: connect to host n7 port 22: Connection timed out", "the node is down"),
        (255, "kex_exchange_identification: read: something new", "ssh -o BatchMode=yes n7 true"),
        (127, "bash: line 1: /v/bin/python: No such file or directory", "install it there at that path"),
        (1, "/v/bin/python: No module named verl", "ssh n7 /v/bin/python -m verl --version"),
    ],
)
def test_a_complaint_has_its_words_and_a_remedy(code: int, said: str, remedy: str) -> None:
    told = not_connected("n7", code, said + "\n", "/v/bin/python")
    assert told.startswith(f"n7: {said}")
    assert remedy in told and "{node}" not in told


def test_silence_is_told_too() -> None:
    assert "255" in not_connected("n7", 255, "", "python")
