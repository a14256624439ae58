"""Machines are taken out of service and back by those who say their names."""

from __future__ import annotations

import json

import pytest

from atoll.runtime.gateway.console.draining import drain, take_back
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.member import Backend, Facts
from tests.runtime.gateway.console.viewing import KeptLog, Nodes, View, node, service


def two() -> View:
    view = View(log=KeptLog())
    view.add("a", "m")
    view.add("b", "m", "other")
    return view


def body(confirm: str, **more: object) -> bytes:
    return json.dumps({"confirm": confirm} | more).encode()


def refusal(view: View, machine: str, said: bytes) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as caught:
        drain(view, machine, said, "admin")
    return caught.value.status, caught.value.code, caught.value.message


def test_drain_and_take_back() -> None:
    view = two()
    shown = drain(view, "a", body("a"), "k1")
    assert (shown.state, shown.drained) == ("drained", True)
    assert {view.pool.pick("m").name for _ in range(8)} == {"b"}  # type: ignore[union-attr]
    drain(view, "a", body("a"), "k2")
    shown = take_back(view, "a", "k3")
    assert (shown.state, shown.drained) == ("up", False)
    take_back(view, "a", "k4")
    assert isinstance(view.log, KeptLog)
    # What changed nothing is not in the log.
    assert [(name, fields["machine"], fields["by"]) for name, fields in view.log.events] == [
        ("machine.drained", "a", "k1"),
        ("machine.returned", "a", "k3"),
    ]


def test_name_is_needed() -> None:
    view = two()
    for said in (b"", b"{}", body("b"), body("A")):
        assert refusal(view, "a", said)[:2] == (400, "confirmation_needed")
    for said in (b"{", b"[]", b'{"confirm": 1}', b"[" * 60_000):
        assert refusal(view, "a", said)[0] == 400
    assert refusal(view, "a", b" " * 100_000)[0] == 413
    assert refusal(view, "nobody", body("nobody"))[0] == 404
    assert not view.pool.members["a"].drained


def test_last_one_of_a_model_is_drained_by_force_only() -> None:
    view = two()
    status, code, message = refusal(view, "b", body("b"))
    assert (status, code) == (409, "last_backend")
    assert "serves other;" in message
    assert drain(view, "b", body("b", force=True), "admin").drained
    assert refusal(view, "a", body("a"))[1] == "last_backend"
    # One that is down serves nobody: taking it out takes nothing away.
    view.pool.set_health("a", up=False, reason="gone")
    assert drain(view, "a", body("a"), "admin").drained


def test_part_of_a_model_cannot_be_drained_here() -> None:
    view = View(federation=Nodes([node("s-1", "gpu1", services=[service("m", [0, 4])])]))
    assert refusal(view, "s-1", body("gpu1"))[:2] == (409, "cannot_drain")


def test_node_stays_drained_when_it_comes_back() -> None:
    view = View(federation=Nodes([node("slot-1", "gpu1"), node("other-1", "gpu2")]))

    def come(sid: str) -> None:
        view.pool.add(Backend(id=sid, url=f"fabric://{sid}", models=("m",)))

    come("slot-1")
    come("other-1")
    drain(view, "slot-1", body("gpu1"), "admin")
    # It says something else, is away for a moment, and then comes as a new session.
    view.pool.update(Backend(id="slot-1", url="fabric://slot-1", models=("m", "n")), Facts())
    view.pool.mask("slot-1", "its token is gone")
    assert view.pool.members["slot-1"].state == "down"
    view.pool.set_health("slot-1", up=True)
    assert view.pool.members["slot-1"].state == "drained"
    view.pool.remove("slot-1")
    come("slot-2")
    assert view.pool.members["slot-2"].state == "drained"
    assert {view.pool.pick("m").name for _ in range(8)} == {"other-1"}  # type: ignore[union-attr]
    view.pool.take_back("slot-2")
    assert view.pool.members["slot-2"].state == "up"
