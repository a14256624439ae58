"""The history of a fleet: whole lines in order, whatever becomes of the controller that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.operation.fleet_history import History, HistoryEvent

EVENTS = st.lists(
    st.builds(
        HistoryEvent,
        at_s=st.floats(0.0, 2e9, allow_nan=False),
        kind=st.sampled_from(("plan", "start", "failure")),
        text=st.text(max_size=300),
        term=st.integers(0, 9),
        instance=st.none() | st.sampled_from(("a", "b")),
    ),
    max_size=12,
)


@given(EVENTS, EVENTS, st.integers(0, 400))
def test_a_torn_end_loses_only_itself(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[HistoryEvent],
    after: list[HistoryEvent],
    cut: int,
) -> None:
    path = tmp_path_factory.mktemp("h") / "history.jsonl"
    log = History(path)
    log.add(*before)
    whole = path.read_bytes() if before else b""
    torn = HistoryEvent(at_s=1.0, kind="note", text="x" * 400).to_json().encode()[: cut or 1]
    path.write_bytes(whole + torn)
    log.add(*after)
    assert log.read() == [*before, *after]
    for name in ("a", "b"):
        mine = [event for event in [*before, *after] if event.instance == name]
        assert log.read(instance=name) == mine
        assert log.read(instance=name, last=2) == mine[-2:]


def test_long_logs_are_read_from_their_end(tmp_path: Path) -> None:
    log = History(tmp_path / "history.jsonl")
    events = [HistoryEvent(at_s=float(n), kind="note", text="y" * 900) for n in range(400)]
    log.add(*events[:200])
    log.add(*events[200:])
    assert log.read() == events
    assert log.read(last=3) == events[-3:]
    assert log.read(since_s=390.0) == events[390:]


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    log = History(tmp_path / "history.jsonl")
    one = HistoryEvent(at_s=1.0, kind="start", text="because", instance="a", usd_per_hour=2.5)
    log.add(one)
    with log.path.open("ab") as file:
        file.write(b'{"at_s": 2, "kind": "of a later version"}\n[]\n\xff\xfe\n')
    log.add(one)
    assert log.read() == [one, one]
    assert History(tmp_path / "none.jsonl").read() == []


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    log = History(tmp_path / "history.jsonl")
    log.add(HistoryEvent(at_s=1.0, kind="note", text="started"))
    assert log.path.stat().st_mode & 0o077 == 0
