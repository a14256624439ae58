from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import Identity, Verifier
from atoll.fabric.tunnel.accept import accepts, check_accept
from atoll.fabric.tunnel.channel import Channel, ForgedError
from atoll.fabric.tunnel.handshake import ClientHandshake, read_hello, refusal, welcome
from atoll.fabric.tunnel.tunnel_frames import CHUNK, TunnelError
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

GATEWAY = Identity.self_made("m001", "gate", "uni", "gateway")
WORKER = Identity.self_made("m002", "node", "lab", "worker")
OTHER = Identity.self_made("m003", "eve", "evil", "gateway")
CALLER_SID, WORKER_SID = keys.new_sid("m001", b"1" * 8), keys.new_sid("m002", b"2" * 8)
OPEN = Verifier("open", None)
SETTINGS = TunnelSettings()


def opening(
    identity: Identity = GATEWAY, fabric: str = "open", caller: str = CALLER_SID
) -> ClientHandshake:
    endpoint = keys.new_sid(keys.slot_of(caller), b"3" * 8)
    return ClientHandshake(identity, fabric, caller, WORKER_SID, endpoint)


def answered(question: bytes, worker: Identity = WORKER) -> tuple[bytes, Channel]:
    hello, person, said = read_hello(question, OPEN, WORKER_SID)
    endpoint = keys.new_sid(worker.slot, b"4" * 8)
    answer, agreed = welcome(worker, hello, person, said, endpoint, 9)
    return answer, Channel(9, agreed.box, SETTINGS, 0.0)


def test_both_sides_get_the_same_keys_and_know_each_other() -> None:
    start = opening()
    hello, person, _ = read_hello(start.hello, OPEN, WORKER_SID)
    assert (person.name, person.provider, hello.caller) == ("gate", "uni", CALLER_SID)
    answer, there = answered(start.hello)
    agreed = start.finish(answer, OPEN)
    assert (agreed.person.name, agreed.channel) == ("node", 9)
    here = Channel(9, agreed.box, SETTINGS, 0.0)
    here.push(CHUNK, 1, b"x")
    assert there.receive(here.flush(0.0)[0], 0.0) == [(CHUNK, 1, b"x")]
    there.push(CHUNK, 1, b"y")
    assert here.receive(there.flush(0.0)[0], 0.0) == [(CHUNK, 1, b"y")]


def test_a_hello_repeated_by_somebody_gives_no_keys() -> None:
    start = opening()
    answer, _ = answered(start.hello)
    _, second = answered(start.hello)
    here = Channel(9, start.finish(answer, OPEN).box, SETTINGS, 0.0)
    here.push(CHUNK, 1, b"x")
    with pytest.raises(ForgedError):
        second.receive(here.flush(0.0)[0], 0.0)


def test_an_answer_of_somebody_else_is_refused() -> None:
    start = opening()
    with pytest.raises(TunnelError, match="not of the worker"):
        start.finish(answered(start.hello, OTHER)[0], OPEN)


def test_an_answer_to_another_question_is_refused() -> None:
    answer, _ = answered(opening().hello)
    with pytest.raises(TunnelError, match="signature"):
        opening().finish(answer, OPEN)


def test_a_caller_cannot_take_the_name_of_another() -> None:
    with pytest.raises(TunnelError, match="not its own"):
        read_hello(opening(OTHER).hello, OPEN, WORKER_SID)
    body, _ = msgspec.msgpack.decode(opening().hello)
    forged = msgspec.msgpack.encode([body, OTHER.sign(b"atoll tunnel 1 hello " + body)])
    with pytest.raises(TunnelError, match="signature"):
        read_hello(forged, OPEN, WORKER_SID)


def test_answers_go_only_to_the_caller_itself() -> None:
    elsewhere = ClientHandshake(
        GATEWAY, "open", CALLER_SID, WORKER_SID, keys.new_sid("m009", b"5" * 8)
    )
    with pytest.raises(TunnelError, match="address"):
        read_hello(elsewhere.hello, OPEN, WORKER_SID)


def test_a_hello_for_another_worker_or_fabric_is_refused() -> None:
    with pytest.raises(TunnelError, match="somebody else"):
        read_hello(opening().hello, OPEN, keys.new_sid("m002", b"9" * 8))
    with pytest.raises(TunnelError, match="somebody else"):
        read_hello(opening(fabric="other").hello, OPEN, WORKER_SID)


def test_certificates_of_another_authority_are_refused() -> None:
    closed = Verifier("open", WORKER.certificate)
    with pytest.raises(TunnelError, match="not of this fabric"):
        read_hello(opening().hello, closed, WORKER_SID)


def test_revoked_certificates_are_refused() -> None:
    verifier = Verifier("open", None)
    verifier.revoke([verifier.person(GATEWAY.certificate).serial])
    with pytest.raises(TunnelError, match="revoked"):
        read_hello(opening().hello, verifier, WORKER_SID)


def test_only_gateways_and_operators_call_where_roles_mean_something() -> None:
    class Vouching(Verifier):
        def person(self, certificate: bytes):  # type: ignore[no-untyped-def]
            return dataclasses.replace(super().person(certificate), verified=True)

    read_hello(opening().hello, Vouching("open", None), WORKER_SID)
    worker = opening(Identity.self_made("m001", "n", "p", "worker"))
    with pytest.raises(TunnelError, match="may not call"):
        read_hello(worker.hello, Vouching("open", None), WORKER_SID)


def test_a_refusal_says_why() -> None:
    with pytest.raises(TunnelError, match="refused: not today"):
        opening().finish(refusal("not today"), OPEN)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(TunnelError):
        read_hello(noise, OPEN, WORKER_SID)
    with pytest.raises(TunnelError):
        opening().finish(noise, OPEN)


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (None, True),
        ("any", True),
        ("self", False),
        ("allow:uni", True),
        ("allow: x, gate ", True),
        ("allow:lab", False),
        ("deny:uni", False),
        ("deny:gate,x", False),
        ("deny:lab", True),
        ("nonsense", False),
        ("deny", False),
        ("deny:", False),
        ("", False),
    ],
)
def test_who_is_accepted(rule: str | None, allowed: bool) -> None:
    assert accepts(rule, "lab", "gate", "uni") is allowed
    assert accepts("self", "uni", "gate", "uni")


@pytest.mark.parametrize("rule", ["", "nonsense", "allow", "allow:", "deny: ,", "ANY"])
def test_rules_that_cannot_be_read(rule: str) -> None:
    with pytest.raises(Exception, match="accept"):
        check_accept(rule)
    for good in (None, "any", "self", "allow:a", "deny:a,b"):
        check_accept(good)
