"""A run's settings as flat text, to be held against other ranks' without telling secrets."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from verl.config import PPOConfig, leaves
from verl.mesh.spec import MeshSpec
from verl.monitor.redact import redact

DIGITS = 12
"""Hexadecimal digits of a digest."""


def settings(config: PPOConfig, mesh: MeshSpec) -> dict[str, str]:
    """Dotted name -> value as JSON. A value that holds a secret has its place only, and a digest of the whole."""
    flat = {name: value for name, value in leaves(config) if name != "device_mesh"}
    for role, entry in mesh.roles.items():
        flat |= {f"device_mesh.{role}.{name}": value for name, value in leaves(entry)}
    return {name: _text(name, value) for name, value in flat.items()}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _text(name: str, value: Any) -> str:
    key = name.rpartition(".")[2]
    plain = json.loads(json.dumps(value, default=str, sort_keys=True))
    shown = redact({key: plain})[key]
    text = json.dumps(shown, sort_keys=True)
    return text if shown == plain else f"{text} (digest {digest(json.dumps(plain, sort_keys=True).encode())})"
