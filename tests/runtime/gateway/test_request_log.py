"""The way of a request: who worked on it and when, and what executors add to that."""

from __future__ import annotations

from typing import Any

from atoll.runtime.gateway.request_log import (
    LoggedRequest,
    RequestLog,
    TriedBackend,
    executor_spans,
)


def logged(name: str = "r1", **fields: Any) -> LoggedRequest:
    usual: dict[str, Any] = {
        "id": name,
        "trace": "a" * 32,
        "model": "m",
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "started_s": 1000.0,
        "seconds": 3.0,
        "first_s": 1.5,
        "key_id": None,
        "prefills": (),
        "tried": (TriedBackend("a", 0.5, 3.0),),
    }
    return LoggedRequest(**(usual | fields))


def shape(request: LoggedRequest) -> list[tuple[Any, ...]]:
    return [(s["kind"], s["name"], s["start_s"], s["seconds"]) for s in request.spans()]


def test_a_request_waits_reads_and_writes() -> None:
    assert shape(logged())[1:] == [
        ("wait", "waits for a machine", 0.0, 0.5),
        ("attempt", "a", 0.5, 2.5),
        ("first", "until the first token", 0.5, 1.0),
        ("tokens", "further tokens", 1.5, 1.5),
    ]


def test_a_request_that_moved_shows_who_failed_it() -> None:
    spans = logged(tried=(TriedBackend("a", 0.0, 1.0), TriedBackend("b", 1.0, 3.0))).spans()
    assert [(s["name"], s["failed"]) for s in spans if s["kind"] == "attempt"] == [
        ("a", True),
        ("b", False),
    ]


def test_prefill_and_decode_stand_apart() -> None:
    kinds = [s["kind"] for s in logged(prefills=(TriedBackend("p", 0.1, 0.5),)).spans()]
    assert kinds == ["gateway", "wait", "prefill", "decode", "first", "tokens"]


def test_a_request_that_nobody_took_only_waited() -> None:
    assert shape(logged(tried=(), first_s=None, outcome="error"))[1:] == [
        ("wait", "waits for a machine", 0.0, 3.0)
    ]


def test_executors_hang_below_the_attempt() -> None:
    told = {
        "intake_s": 0.2,
        "invocations": [
            {
                "component": "ears",
                "executor": "e1",
                "started_s": 0.25,
                "took_s": 0.5,
                "waited_s": 0.1,
                "ran_s": 0.4,
                "batch": 3,
                "troubles": [],
            },
            {"component": "voice", "executor": "e2", "started_s": 1.0, "took_s": None},
        ],
    }
    intake, ears = executor_spans(told, 2.0)
    assert (intake["kind"], intake["start_s"], intake["seconds"]) == ("intake", 2.0, 0.2)
    assert (ears["name"], ears["start_s"], ears["batch"]) == ("ears on e1", 2.25, 3)


def test_the_oldest_go_and_traces_find_requests_too() -> None:
    log = RequestLog(kept=2)
    for n in range(3):
        log.add(logged(f"r{n}", trace=f"{n}" * 32))
    assert [one.id for one in log.last()] == ["r2", "r1"]
    assert log.get("r0") is None
    found = log.get("1" * 32)
    assert found is not None
    assert found.id == "r1"
