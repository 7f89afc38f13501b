"""A model's files from the hub, by way of this node's cache; without a network that is said soon."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from verl.errors import UserError

CONNECT_SECONDS = 10.0
"""For a connection to the hub, of whatever speed; a firewall that drops packets gives no answer at all."""
_PORTS = {"http": 80, "https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}


def hub_folder(path: str, patterns: Sequence[str], fetch: bool) -> Path:
    """The folder in this node's cache with the files of a hub id. With `fetch` the hub is asked for what is missing.

    Where the hub cannot be reached, what is in the cache will do. The hub's own library waits for a connection as long
    as TCP does, and asks for some files six times, so that it would take minutes to say so.

    Raises UserError where there is nothing to be had.
    """
    from huggingface_hub import constants, snapshot_download

    barrier = _barrier(*_first_hop(constants.ENDPOINT)) if fetch and not constants.HF_HUB_OFFLINE else ""
    try:
        asks = fetch and not barrier
        return Path(snapshot_download(path, local_files_only=not asks, allow_patterns=list(patterns)))
    except Exception as error:  # among them those of the hub's HTTP library, which is another one from year to year
        raise UserError(
            f"'{path}' is neither a folder here ({Path(path).absolute()}) nor to be had from the hub: "
            f"{_what_to_do(path, error, barrier)}"
        ) from error


def _what_to_do(path: str, error: Exception, barrier: str) -> str:
    """Why there is nothing to be had, and the remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    why = _first_line(cause)
    if isinstance(error, HFValidationError):
        return f"{why}. Set the path to a model folder or a hub id such as 'org/name'."
    answer = next((one for one in (error, cause) if isinstance(one, HfHubHTTPError)), None)
    if answer is not None:
        return (
            f"{_first_line(answer)}. See whether the name is right, and {constants.ENDPOINT} the hub that is meant "
            "(HF_ENDPOINT); a private or gated model needs the HF_TOKEN of an account that may read it."
        )
    ways = (
        f"Set the path to a model folder, or fetch it into this node's cache, {constants.HF_HUB_CACHE}, where there is "
        f"a network: hf download {path}"
    )
    if not barrier and isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
        offline = "HF_HUB_OFFLINE is set, and " if constants.HF_HUB_OFFLINE else ""
        return f"{offline}it is not in the cache. {ways}."
    named = "a mirror is named by HF_ENDPOINT, a proxy by HTTPS_PROXY"
    return f"{barrier or why}, and it is not in the cache. {ways}; {named}."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__


def _first_hop(endpoint: str) -> tuple[str, str, int]:
    """(what it is, host, port) of what a request to the hub connects to: the hub, or the environment's proxy."""
    url = urlsplit(endpoint)
    proxies = {} if proxy_bypass(url.hostname or "") else getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    hop = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
    what = f"the proxy {hop.hostname}:{hop.port}" if proxy else endpoint
    return what, hop.hostname or "", hop.port or _PORTS.get(hop.scheme, 443)


@cache
def _barrier(what: str, host: str, port: int) -> str:
    """Why no connection to it can be made; "" where one can. Nothing is sent."""
    try:
        reason = _connect(host, port, CONNECT_SECONDS)
    except OSError as error:  # no address is known
        reason = error.strerror or str(error)
    return f"{what} cannot be reached ({reason})" if reason else ""


def _connect(host: str, port: int, limit: float) -> str:
    """Tries all addresses of a host at once, since of two networks one may lead nowhere. Why none answers, or ""."""
    deadline, code = time.monotonic() + limit, errno.EHOSTUNREACH
    with ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = opened.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            code = connection.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                waiting.register(connection, selectors.EVENT_WRITE)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return f"no answer within {limit:.0f} s"
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    return ""
                waiting.unregister(key.fileobj)
    return os.strerror(code)
