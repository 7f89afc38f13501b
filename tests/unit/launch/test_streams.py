"""Many nodes' output on one terminal."""

from __future__ import annotations

import io
import os
import threading
from typing import BinaryIO, cast

from hypothesis import given
from hypothesis import strategies as st

from verl.launch.streams import LONGEST_LINE, LineSplitter, Output


def lines_of(chunks: list[bytes]) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.close()


def test_lines() -> None:
    assert lines_of([b"one\n\ntwo\r\nthr", b"ee"]) == [b"one", b"", b"two", b"three"]
    assert lines_of([]) == []


def test_a_progress_bar_shows_each_of_its_states() -> None:
    assert lines_of([b"\rload 10%\rload 20%", b"\rload 100%\ndone\n"]) == [
        b"load 10%", b"load 20%", b"load 100%", b"done",
    ]  # fmt: skip


@given(st.lists(st.binary() | st.sampled_from([b"\n", b"\r", b"\r\n", b"a"])))
def test_where_the_output_is_cut_changes_nothing(chunks: list[bytes]) -> None:
    whole = lines_of([b"".join(chunks)])
    assert lines_of(chunks) == whole
    assert not any(b"\n" in line or b"\r" in line for line in whole)
    text = b"".join(chunks)
    assert b"".join(whole) == text.replace(b"\r", b"").replace(b"\n", b"")


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (LONGEST_LINE - 1)) == []
    assert splitter.feed(b"xx") == [b"x" * (LONGEST_LINE + 1)]
    assert splitter.close() == []


def test_threads_do_not_write_into_each_others_lines() -> None:
    stream = io.BytesIO()
    output = Output(stream)

    def write(node: str) -> None:
        for _ in range(200):
            output.line(node, node.encode() * 50)

    threads = [threading.Thread(target=write, args=(node,)) for node in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().decode().splitlines()
    assert sorted(lines) == sorted(f"{node} | {node * 50}" for node in "abcd" for _ in range(200))


def test_a_reader_that_has_gone_is_no_error_and_is_noted() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb", buffering=0) as stream:
        output = Output(cast(BinaryIO, stream))
        assert not output.is_broken
        output.line("a", b"lost")
        assert output.is_broken
        output.line("a", b"lost too")
        output.say("this too")
