"""Traces: what is refused, what stays of an upload, and how many are kept."""

from __future__ import annotations

import gzip
import stat
from pathlib import Path

import pytest

from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.planner import trace_store as traces
from atoll.planner.trace_store import ShownTrace, TraceStore, clean_name, read_upload

HEADER = "arrival_s,input_tokens,output_tokens"


def _upload(store: TraceStore, body: bytes, name: str = "mine.csv") -> ShownTrace:
    at, path = store.receive(body)
    said = read_upload({"path": str(path), "target": str(store.target(at))}, lambda _said: None)
    return store.add(at, name, said["stats"]).describe()


def _rows(count: int, header: str = HEADER) -> bytes:
    rows = "".join(f"{at / 2:.1f},{100 + at % 7},{20 + at % 5}\n" for at in range(count))
    return f"{header}\n{rows}".encode()


def test_built_in_ones_are_listed(tmp_path: Path) -> None:
    listed = TraceStore(tmp_path / "t").describe()
    assert {trace["kind"] for trace in listed} == {"builtin"}
    conv = next(trace for trace in listed if trace["id"] == "azure-conv")
    assert conv["requests"] is None
    assert (conv["requests_per_s"] or 0.0) > 0.0
    assert conv["text"]


def test_an_upload_is_read_and_what_was_sent_is_gone(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t")
    found = _upload(store, _rows(2000))
    assert found["requests"] == 2000
    assert found["kind"] == "uploaded"
    assert found["seconds"] == 999.5
    timeline = found["timeline"]
    assert isinstance(timeline, list)
    assert 100 <= len(timeline) <= 200
    assert all(1.9 <= rate <= 2.1 for _, rate in timeline)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
    files = list((tmp_path / "t").iterdir())
    assert [file.name for file in files] == [f"{found['id']}.csv"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_prompts_do_not_stay(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t")
    body = f"{HEADER},prompt\n0.0,3,4,my secret\n1.0,5,6,my secret\n2.0,x,6,my secret\n".encode()
    found = _upload(store, body)
    assert (found["requests"], found["bad_rows"]) == (2, 1)
    kept = (tmp_path / "t" / f"{found['id']}.csv").read_text()
    assert "secret" not in kept
    assert "secret" not in str(found)
    assert store.find(str(found["id"])).path.read_text() == kept


def test_a_line_of_json_is_a_request(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t")
    line = (
        '{"timestamp": %d, "input_length": 10, "output_length": 5, "hash_ids": [1], "text": "no"}\n'
    )
    found = _upload(store, "".join(line % (at * 1000) for at in range(5)).encode(), "a.jsonl")
    assert found["requests"] == 5


BAD = {
    "empty": b"",
    "gzip": gzip.compress(b"\0" * 100_000),
    "zip": b"PK\x03\x04" + b"\0" * 100,
    "zstd": b"\x28\xb5\x2f\xfd" + b"\0" * 100,
    "binary": bytes(range(256)) * 40,
    "latin": b"arrival_s,input_tokens,output_tokens\n0,1,\xff\n",
    "page": b"<html><body>hello</body></html>",
    "header alone": HEADER.encode(),
    "columns": b"a," * 1_000_000,
    "many columns": HEADER.encode() + b",a" * 400_000 + b"\n0,1,1\n",
    "not a number": HEADER.encode() + b"\nnan,1,1\n",
    "infinite": HEADER.encode() + b"\n0,inf,1\n1e999,1,1\n",
    "negative": HEADER.encode() + b"\n-1,1,1\n0,-5,1\n",
    "huge": HEADER.encode() + b"\n0,1e300,1\n0,99999999999999999999,1\n",
    "long line": HEADER.encode() + b"\n" + b"9" * 2_000_000,
    "nested": b"[" * 100_000 + b"\n" + b"{" * 100_000,
    "many models": (
        HEADER + ",model\n" + "".join(f"{at},1,1,prompt {at}\n" for at in range(200))
    ).encode(),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "many columns" else [])
        for name in BAD
    ],
)
def test_what_is_no_trace_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t")
    with pytest.raises(AtollError) as caught:
        _upload(store, BAD[name])
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "t").exists() or not list((tmp_path / "t").iterdir())
    assert all(trace["kind"] == "builtin" for trace in store.describe())


def test_a_row_at_the_end_of_time_does_not_blow_up(tmp_path: Path) -> None:
    found = _upload(TraceStore(tmp_path / "t"), HEADER.encode() + b"\n0,1,1\n1e14,1,1\n")
    assert found["requests"] == 2
    assert len(found["timeline"]) <= 200


def test_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(traces, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="64 MiB"):
        TraceStore(tmp_path / "t").receive(b"x" * 101)


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(float(at) for at in range(10_000))
    store = TraceStore(tmp_path / "t", lambda: next(clock))
    monkeypatch.setattr(traces, "_MAX_TRACES", 2)
    ids = [str(_upload(store, _rows(3), f"{at}.csv")["id"]) for at in range(3)]
    left = [trace["id"] for trace in store.describe() if trace["kind"] == "uploaded"]
    assert left == [ids[2], ids[1]]
    assert len(list((tmp_path / "t").iterdir())) == 2
    monkeypatch.setattr(traces, "_MAX_TOTAL_BYTES", store.find(ids[2]).bytes)
    assert [t["id"] for t in store.describe() if t["kind"] == "uploaded"] == [ids[2]]


def test_a_day_later_they_are_gone(tmp_path: Path) -> None:
    now = [0.0]
    store = TraceStore(tmp_path / "t", lambda: now[0])
    name = str(_upload(store, _rows(3))["id"])
    now[0] = 86_401.0
    with pytest.raises(UnknownNameError):
        store.find(name)
    assert not list((tmp_path / "t").iterdir())


def test_uploads_are_deleted_and_built_in_ones_are_not(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t")
    name = str(_upload(store, _rows(3))["id"])
    store.remove(name)
    assert not list((tmp_path / "t").iterdir())
    with pytest.raises(UnknownNameError):
        store.remove(name)
    with pytest.raises(InputError, match="built in"):
        store.remove("azure-conv")
    with pytest.raises(UnknownNameError):
        store.remove("../../etc/passwd")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("mine.csv", "mine.csv"),
        ("../../etc/passwd", "passwd"),
        ("C:\\tmp\\a.csv", "a.csv"),
        ("a\x00\nb\x1b[31m.csv", "ab[31m.csv"),
        ("", "trace"),
        ("x" * 500, "x" * 100),
    ],
)
def test_names_are_only_shown(sent: str, shown: str) -> None:
    assert clean_name(sent) == shown
