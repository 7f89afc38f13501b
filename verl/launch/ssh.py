"""OpenSSH's client, asked for what it knows of a node; and what to do about its complaints."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from verl.errors import UserError

LOST = 255
"""ssh's exit code where it could not connect, or has lost the connection."""
_NOT_FOUND = (126, 127)
"""A shell's exit codes for a command that it cannot run."""

_REMEDIES = {
    "Could not resolve hostname": "name it in the mesh as ssh knows it, or add {node} to ~/.ssh/config or /etc/hosts",
    "Host key verification failed": "look at its host key once, by hand: ssh {node}",
    "Permission denied": "let your key in there: ssh-copy-id {node} (one with a passphrase needs ssh-agent here)",
    "Connection refused": "sshd does not listen there: start it, or set Port for {node} in ~/.ssh/config",
    "timed out": "the node is down, or a firewall stands between: try ssh {node} true",
    "No route to host": "the node is down, or it has another address: try ssh {node} true",
}


def addresses(nodes: Sequence[str], config: str | None) -> dict[str, str]:
    """The address that ssh would use for each node, which is its name unless HostName in ssh's files says otherwise."""
    return {node: _host_name(node, config) for node in nodes}


def _host_name(node: str, config: str | None) -> str:
    flags = ["-F", config] if config is not None else []
    try:
        said = subprocess.run(["ssh", *flags, "-G", "--", node], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("verl launch: there is no ssh here; install OpenSSH's client (openssh-client)") from None
    if said.returncode != 0:
        raise UserError(f"verl launch: ssh does not take its own files: {said.stderr.strip()}")
    (address,) = [
        value for key, _, value in (line.partition(" ") for line in said.stdout.splitlines()) if key == "hostname"
    ]
    return node if address == node.lower() else address  # ssh writes names in lower case


def not_connected(node: str, code: int, said: str, python: str) -> str:
    """Why a node could not be started, with ssh's or the shell's own words, and what to do."""
    words = (
        "; ".join(line.strip() for line in said.splitlines() if line.strip()) or f"it ended with code {code} in silence"
    )
    if code in _NOT_FOUND:
        remedy = f"verl launch runs the same python on every node, {python}: install it there at that path, or share it"
    elif code != LOST:
        remedy = f"python or verl does not start there; try ssh {node} {python} -m verl --version"
    else:
        matching = (text for words_of, text in _REMEDIES.items() if words_of in said)
        remedy = next(matching, "it must work without a question: ssh -o BatchMode=yes {node} true").format(node=node)
    return f"{node}: {words}\n  {remedy}"
