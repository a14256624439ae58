"""Recordings: readable by our own traces, equal where prompts are equal, silent about what they say."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.telemetry.background import Background
from atoll.telemetry.traffic_recording import BLOCK_TOKENS, Recorder, block_ids, prompt_of
from atoll.workload.requests import collect
from atoll.workload.traces import read_trace

SECRET = b"k" * 32


def chat(*said: str, **more: object) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return json.dumps({"messages": messages} | more).encode()


def recorded(path: Path, fill: Callable[[Recorder], None]) -> list[dict[str, Any]]:
    recorder = Recorder(path)
    fill(recorder)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def shared(a: list[int], b: list[int]) -> int:
    """How many blocks two prompts begin with in common; none may be equal after one that differs."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_our_reader_reads_what_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    began_s = recorder._began_s
    recorder.record(began_s + 2.0, "b", chat("late"), 20, 3)
    recorder.record(began_s + 1.5, "a", chat("early " * 100), 150, 7)
    recorder.record(began_s - 9.0, "a", [5] * 33, 33, 1)
    recorder.close()
    trace = read_trace(path, strict=True)
    found = collect(trace)
    assert found.arrival_s.tolist() == [0.0, 1.5, 2.0]
    assert found.input.tolist() == [33, 150, 20]
    assert found.output.tolist() == [1, 7, 3]
    assert [found.models[at] for at in found.model.tolist()] == ["a", "a", "b"]
    assert found.prefix is not None
    assert found.prefix.block_tokens == BLOCK_TOKENS
    assert [len(found.prefix.of(row)) for row in range(3)] == [3, 10, 2]
    assert recorder.stats() == {"written": 3, "lost": 0, "skipped": 0}


def test_nothing_of_a_prompt_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    body = chat("my password is hunter2", user="alice")
    (row,) = recorded(path, lambda r: r.record(0.0, "m", body, 40, 2))
    assert set(row) == {
        *("timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "model"),
    }
    assert all(type(each) is int and 0 <= each < 2**53 for each in row["hash_ids"])
    for word in ("password", "hunter2", "alice"):
        assert word not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    def same(recorder: Recorder) -> None:
        recorder.record(0.0, "m", chat("the same words " * 20), 80, 2)

    (one,) = recorded(tmp_path / "one", same)
    (two,) = recorded(tmp_path / "two", same)
    assert len(one["hash_ids"]) == 5
    assert not set(one["hash_ids"]) & set(two["hash_ids"])


def test_a_conversation_goes_on_with_the_same_blocks() -> None:
    first, answer = "word " * 200, "and so on " * 30
    turn1 = block_ids(SECRET, "m", chat(first), 256)
    turn2 = block_ids(SECRET, "m", chat(first, answer, "next"), 400)
    other = block_ids(SECRET, "m", chat("word " * 100 + "else " * 100), 256)
    assert len(turn1) == 16
    assert shared(turn1, turn2) == len(first) // 64
    assert shared(turn1, other) == 500 // 64
    # The same text of another model shares nothing: its cache is its own.
    assert shared(turn1, block_ids(SECRET, "n", chat(first), 256)) == 0


def test_token_ids_are_cut_exactly() -> None:
    a = list(range(100))
    b = [*range(50), *range(200, 250)]
    assert shared(block_ids(SECRET, "m", a, 100), block_ids(SECRET, "m", b, 100)) == 3
    body = json.dumps({"prompt": a}).encode()
    assert block_ids(SECRET, "m", body, 100) == block_ids(SECRET, "m", a, 100)


@given(st.binary(max_size=300), st.integers(1, 200), st.binary(min_size=1, max_size=30))
def test_numbers_fit_the_engine_s_count_whatever_the_text(
    text: bytes, tokens: int, more: bytes
) -> None:
    def ids(said: bytes) -> list[int]:
        return block_ids(
            SECRET, "m", json.dumps({"prompt": said.decode("latin-1")}).encode(), tokens
        )

    assert len(ids(text)) == -(-tokens // 16)
    assert ids(text) == ids(text)
    # A longer prompt is another one, in its last block at the latest.
    assert ids(text)[-1] != ids(text + more)[-1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b"\xff", b'{"prompt":' + b"1" * 5000 + b"}"]
)
def test_what_cannot_be_read_has_no_blocks(body: bytes) -> None:
    assert block_ids(SECRET, "m", body, 5) == []


def test_prompts_of_all_forms() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    parts = [{"type": "text", "text": "look"}, image]
    plain = prompt_of({"messages": [{"role": "user", "content": "look"}]})
    seen = prompt_of({"messages": [{"role": "user", "content": parts}]})
    assert isinstance(plain, bytes)
    assert isinstance(seen, bytes)
    assert seen.startswith(plain[:-1])
    tools = prompt_of({"messages": [{"role": "user", "content": "look"}], "tools": [{"a": 1}]})
    assert tools != plain
    assert prompt_of({"prompt": ["a", "b"]}) != prompt_of({"prompt": ["ab"]})
    assert prompt_of({"prompt": [[1, 2], [3]]}) == [1, 2, 3]
    assert prompt_of({"input": "embedded"}) == b"embedded"
    assert prompt_of({"prompt": "\ud800"}) == b"?"
    strange: list[object] = [{}, [], None, {"prompt": None}, {"messages": [1]}]
    for nothing in strange:
        assert prompt_of(nothing) == b""


def test_requests_without_an_answer_are_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace")
    recorder.record(0.0, "m", chat("x"), 5, 0)
    recorder.record(0.0, "m", chat("x"), 0, 5)
    recorder.close()
    assert (tmp_path / "trace").read_text() == ""
    assert recorder.stats() == {"written": 0, "lost": 0, "skipped": 2}


def test_files_are_rotated_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for number in range(6):
        recorder = Recorder(path, keep=3)
        recorder.record(0.0, f"m{number}", chat("x"), 5, 1)
        recorder.close()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["trace", "trace.1", "trace.2", "trace.3"]
    assert [json.loads((tmp_path / n).read_text())["model"] for n in names] == [
        *("m5", "m4", "m3", "m2"),
    ]


def test_a_full_file_is_rotated(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace", max_bytes=2000)
    for number in range(40):
        recorder._write([_entry(recorder, number)])
    recorder.close()
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert len(sizes) == 3
    assert max(sizes.values()) <= 2000
    lines = [
        json.loads(line)["output_length"]
        for name in ("trace.2", "trace.1", "trace")
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert lines == [*range(1, 41)]


def _entry(recorder: Recorder, number: int) -> Any:
    from atoll.telemetry.traffic_recording import _Entry

    return _Entry(recorder._began_s, "m", chat("x"), 5, number + 1, 0)


def test_a_recording_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the recording"):
        Recorder(tmp_path / "absent" / "trace")


def test_large_bodies_do_not_fill_the_memory(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace")
    held = threading.Event()

    def wait(batch: list[Any]) -> None:
        held.wait(5)

    recorder._thread._handle = wait
    body = bytes(30 * 2**20)
    for _ in range(4):
        recorder.record(0.0, "m", body, 5, 5)
    assert recorder.stats()["lost"] == 2
    held.set()
    recorder.close()


def test_a_lost_batch_is_counted_and_the_next_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace")
    recorder.record(0.0, "m", [-1], 5, 5)  # no token id
    recorder._thread.close()
    assert recorder.stats()["lost"] == 1
    assert "OverflowError" in recorder.error
    recorder.close()


def test_background_keeps_order_and_refuses_what_is_too_much() -> None:
    seen: list[int] = []
    gate = threading.Event()

    def handle(batch: list[int]) -> None:
        gate.wait(5)
        if batch == [0]:
            raise OSError("first")
        seen.extend(batch)

    thread = Background("test", handle, most=1000, pause_s=0.0)
    thread.offer(0)
    while thread._queue.qsize():
        os.sched_yield()
    taken = sum(thread.offer(number) for number in range(1, 1101))
    gate.set()
    assert thread.close()
    assert taken == 1000
    assert seen == [*range(1, 1001)]
    assert thread.lost == 101
    assert thread.error == "OSError: first"
    assert not thread.offer(1)
    assert thread.close()
