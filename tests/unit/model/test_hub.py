"""The hub as a stand-in on this machine: it answers, refuses, closes the door, or is behind a firewall."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from verl.advise.model import find_config
from verl.errors import UserError
from verl.model import hub as hub_module
from verl.model.folder import local_folder
from verl.model.hub import hub_folder


@dataclass
class Hub:
    """What answers for the hub, and what it was asked."""

    status: int
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Gives every request the status of the parameter; 0: the connection is closed without an answer."""
    hub = Hub(request.param)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            if hub.status:
                self.send_error(hub.status)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", monkeypatch)
    yield hub
    server.shutdown()
    server.server_close()


def use_hub(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub_module._barrier.cache_clear()


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of a node that reaches no hub."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        use_hub(f"http://127.0.0.1:{nobody.getsockname()[1]}", tmp_path / "cache", monkeypatch)
        yield tmp_path / "cache"


FINDS = {
    "verl mesh check": lambda: find_config("org/name"),
    "a run": lambda: local_folder("org/name", "model.path", fetch=True),
}


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
@pytest.mark.parametrize("hub", [0, 503], indirect=True)
def test_a_hub_that_fails_is_not_tried_again_and_again(hub: Hub, find: Callable[[], object]) -> None:
    """Each time would cost the user seconds, and the waits between them a minute."""
    with pytest.raises(UserError, match="nor to be had from the hub"):
        find()
    assert len([path for path in hub.asked if "org/name" in path]) == 1


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_behind_a_firewall_nobody_waits_for_tcp_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[], object]
) -> None:
    monkeypatch.setattr(hub_module, "CONNECT_SECONDS", 1.0)
    with socket.socket() as full, socket.socket() as first, socket.socket() as second, socket.socket() as third:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # with what follows waiting to be taken in, the kernel answers nobody else
        for one in (first, second, third):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        use_hub(f"http://127.0.0.1:{full.getsockname()[1]}", tmp_path / "cache", monkeypatch)
        with pytest.raises(UserError, match=r"cannot be reached \(no answer within 1 s\), and it is not in the cache"):
            find()


def test_a_proxy_on_the_way_is_named(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{port}")
        with pytest.raises(UserError, match=rf"the proxy 127\.0\.0\.1:{port} cannot be reached") as caught:
            find_config("org/name")
    assert "secret" not in str(caught.value)


def test_a_host_that_nobody_knows(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")  # RFC 2606: no such name will ever be
    with pytest.raises(UserError, match=r"http://hub\.invalid cannot be reached \("):
        find_config("org/name")


def test_without_a_network_every_way_out_is_named(no_network: Path) -> None:
    with pytest.raises(UserError) as caught:
        local_folder("org/name", "model.path", fetch=True)
    said = str(caught.value)
    assert said.startswith("model.path: 'org/name' is neither a folder here (")
    assert f"{constants.ENDPOINT} cannot be reached (" in said and "Connection refused" in said
    for remedy in (
        "Set the path to a model folder",
        f"fetch it into this node's cache, {no_network}, where there is a network: hf download org/name",
        "HF_ENDPOINT",
        "HTTPS_PROXY",
    ):
        assert remedy in said
    assert "\n" not in said


def test_offline_on_purpose(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and it is not in the cache"):
        local_folder("org/name", "model.path", fetch=True)


@pytest.mark.parametrize("hub", [401, 404], indirect=True)
def test_a_model_that_the_hub_does_not_give(hub: Hub) -> None:
    with pytest.raises(UserError, match=r"name is right, and http://127.*a private or gated model needs the HF_TOKEN"):
        local_folder("org/name", "model.path", fetch=True)


def test_without_a_network_the_cache_will_do(no_network: Path) -> None:
    folder = no_network / "models--org--name" / "snapshots" / "0123456789012345678901234567890123456789"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    refs = no_network / "models--org--name" / "refs" / "main"
    refs.parent.mkdir()
    refs.write_text(folder.name)
    assert hub_folder("org/name", ["*.json"], fetch=True) == folder
    assert find_config("org/name").get_text_config().hidden_size == 64
