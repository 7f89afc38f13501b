"""A node's process as the launcher sees it, with a shell in place of ssh."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.jobs import wait_until
from verl.launch.keeper import Keeper
from verl.launch.node import GREETING
from verl.launch.plan import NodePlan, Order
from verl.launch.streams import Output

PLAN = NodePlan("a", False, 1, Order(("true",), {}, "/"))
LIMIT = 300.0


@contextmanager
def kept(script: str) -> Iterator[tuple[Keeper, io.BytesIO, io.BytesIO]]:
    """A keeper that runs a shell script, and what it has written to both streams."""
    out, err = io.BytesIO(), io.BytesIO()
    keeper = Keeper(PLAN, ["sh", "-c", script], Output(out), Output(err))
    try:
        yield keeper, out, err
    finally:
        keeper.close()


@pytest.mark.parametrize("noise", ["echo welcome; ", "printf 'no end '; ", ""])
def test_what_a_login_shell_says_does_not_hide_the_greeting(noise: str) -> None:
    with kept(f"{noise}echo warning >&2; echo '{GREETING}'; read order; echo got $order; exit 3") as (keeper, out, err):
        wait_until(lambda: keeper.is_connected, LIMIT, lambda: "not connected")
        assert keeper.code() is None
        keeper.send(b"this\n")
        wait_until(lambda: keeper.code() is not None, LIMIT, lambda: "not ended")
        assert keeper.code() == 3
        assert out.getvalue().endswith(b"a | got this\n") and GREETING.encode() not in out.getvalue()
        assert (b"a | welcome\n" in out.getvalue()) == ("welcome" in noise)
        assert err.getvalue() == b"a | warning\n"


def test_what_is_said_before_an_end_without_greeting_is_kept_for_the_explanation() -> None:
    with kept("echo first >&2; echo second >&2; exit 255") as (keeper, _, err):
        wait_until(lambda: keeper.code() is not None, LIMIT, lambda: "not ended")
        assert keeper.code() == 255 and not keeper.is_connected
        assert keeper.said_before == "first\nsecond" and err.getvalue() == b""


def test_stop_is_said_once_and_an_end_is_no_error() -> None:
    with kept(f"echo '{GREETING}'; cat; exit 0") as (keeper, out, _):
        wait_until(lambda: keeper.is_connected, LIMIT, lambda: "not connected")
        keeper.stop()
        keeper.stop()
        assert keeper.close() and keeper.code() == 0
        assert out.getvalue() == b"a | stop\n"
        keeper.send(b"nobody hears\n")
