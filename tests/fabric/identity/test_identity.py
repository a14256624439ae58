"""Certificates, the authority that issues them, and which records they vouch for."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority, read_revoked
from atoll.fabric.identity.identity import Identity, RefusedError, Verifier
from atoll.fabric.identity.record_trust import node_name, refusal, sign_record
from atoll.fabric.registry.records import Metadata, Record, SessionState, encode_metadata

HUBS = ["127.0.0.1:7447", "hub.example"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "fabric", "test", HUBS, slots=4)


def record(
    access: Access,
    *,
    sid: str | None = None,
    fabric: str | None = None,
    state: SessionState = SessionState.SERVING,
    **said: str,
) -> Record:
    identity = access.identity
    body = {"name": identity.name, "provider": identity.provider, "role": identity.role} | said
    metadata = Metadata(name=body["name"], provider=body["provider"], role=body["role"])  # type: ignore[arg-type]
    return sign_record(
        identity,
        fabric or access.fabric_id,
        sid or f"{identity.slot}-{'0' * 16}",
        state,
        0,
        time.time(),
        encode_metadata(metadata),
    )


def test_a_certificate_says_who_it_is(authority: Authority) -> None:
    access = authority.issue("alps", "ETH Zürich", "gateway")
    person = access.verifier().person(access.identity.certificate)
    assert (person.slot, person.name, person.provider, person.role) == (
        "m001",
        "alps",
        "ETH Zürich",
        "gateway",
    )
    assert person.verified
    assert person.check(b"data", access.identity.sign(b"data"))
    assert not person.check(b"other", access.identity.sign(b"data"))


def test_another_authority_is_foreign(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", "test", HUBS).issue("alps", "ethz", "worker")
    with pytest.raises(RefusedError) as refused:
        authority.issue("a", "p", "worker").verifier().person(other.identity.certificate)
    assert refused.value.reason == "foreign"


def test_self_made_certificates_are_foreign_where_there_is_an_authority(
    authority: Authority,
) -> None:
    made = Identity.self_made("m001", "alps", "ethz", "worker")
    verifier = authority.issue("a", "p", "worker").verifier()
    with pytest.raises(RefusedError) as refused:
        verifier.person(made.certificate)
    assert refused.value.reason == "foreign"
    assert not Verifier("open", None).person(made.certificate).verified


def test_expired_and_revoked_certificates_are_refused(authority: Authority) -> None:
    access = authority.issue("alps", "ethz", "worker", days=10)
    assert access.authority is not None
    late = Verifier(access.fabric_id, access.authority, now=lambda: time.time() + 11 * 86_400)
    with pytest.raises(RefusedError) as refused:
        late.person(access.identity.certificate)
    assert refused.value.reason == "expired"
    verifier = access.verifier()
    person = verifier.person(access.identity.certificate)
    verifier.revoke([person.serial])
    with pytest.raises(RefusedError) as refused:
        verifier.person(access.identity.certificate)
    assert refused.value.reason == "revoked"


@pytest.mark.parametrize("junk", [b"", b"junk", b"0" * 5000])
def test_what_is_no_certificate_is_refused(junk: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        Verifier("open", None).person(junk)
    assert refused.value.reason == "certificate"


def test_records_of_others_are_refused(authority: Authority, tmp_path: Path) -> None:
    alps, como = (authority.issue(name, name, "worker") for name in ("alps", "como"))
    hub = Access.open(f"@{authority.folder}/hub-h0.token")
    verifier = como.verifier()
    assert refusal(verifier, record(alps)) is None
    other_sid = f"{como.identity.slot}-{'0' * 16}"
    assert refusal(verifier, record(alps, sid=other_sid)) == "session of another"
    left = record(alps, sid=other_sid, state=SessionState.LEFT)
    assert refusal(verifier, left) == "session of another"
    assert refusal(verifier, record(hub, sid=other_sid, state=SessionState.LEFT)) is None
    assert refusal(verifier, record(hub, sid=other_sid)) == "session of another"
    assert refusal(verifier, record(alps, provider="como")) == "forged provider"
    assert refusal(verifier, record(alps, role="operator")) == "forged provider"
    assert refusal(verifier, record(alps, name="como")) == "forged provider"
    assert refusal(verifier, record(alps, name="alps/node 1")) is None
    assert refusal(verifier, record(alps, fabric="f" * 16)) == "signature"
    good = record(alps)
    moved = Record(
        good.sid, SessionState.LEFT, 1, good.signed_s, good.body, good.certificate, good.signature
    )
    assert refusal(verifier, moved) == "signature"
    foreign = Authority.create(tmp_path / "other", "test", HUBS).issue("alps", "alps", "worker")
    assert refusal(verifier, record(foreign, fabric=alps.fabric_id)) == "foreign"


def test_names_of_nodes_stay_below_their_certificate() -> None:
    assert node_name("alps", "") == "alps"
    assert node_name("alps", "alps") == "alps"
    assert node_name("alps", "n1") == "alps/n1"
    assert node_name("alps", "alps/n1") == "alps/n1"
    assert node_name("alps", "como/n1") == "alps/como/n1"


def test_an_authority_is_never_overwritten(authority: Authority) -> None:
    before = (authority.folder / "ca.key").read_bytes()
    with pytest.raises(UsageError, match="holds a fabric already"):
        Authority.create(authority.folder, "again", HUBS)
    assert (authority.folder / "ca.key").read_bytes() == before


def test_keys_are_for_their_owner_only(authority: Authority) -> None:
    for name in ("ca.key", "fabric.token", "hub-h0.token", "hub-h1.token"):
        assert stat.S_IMODE((authority.folder / name).stat().st_mode) == 0o600, name
    assert stat.S_IMODE(authority.folder.stat().st_mode) == 0o700


def test_slots_are_given_once(authority: Authority) -> None:
    slots = [authority.issue(name, "p", "worker").identity.slot for name in "abc"]
    assert slots == ["m001", "m002", "m003"]
    with pytest.raises(UsageError, match="all 4 slots are taken"):
        authority.issue("d", "p", "worker")
    assert len(Authority(authority.folder).members) == 2 + 1 + 3


def test_a_fabric_grows_and_what_was_issued_stays_good(authority: Authority) -> None:
    before = [authority.issue(name, "p", "worker") for name in "abc"]
    hub = Access.open(f"@{authority.folder / 'hub-h0.token'}")
    with pytest.raises(UsageError, match="all 4 slots") as refused:
        authority.issue("d", "p", "worker")
    assert "atoll fabric grow" in str(refused.value.hint)
    for wrong in (3, 4, 10_001):
        with pytest.raises(UsageError, match="there are 4 slots"):
            authority.grow(wrong)
    assert authority.grow(10_000) == tuple(authority.folder / f"hub-h{n}.token" for n in range(2))
    grown = Access.open(f"@{authority.folder / 'hub-h0.token'}")
    assert (hub.slots, grown.slots) == (4, 10_000)
    assert (grown.certificate, grown.key, grown.hubs) == (hub.certificate, hub.key, hub.hubs)
    assert authority.issue("d", "p", "worker").identity.slot == "m004"
    for access in before:
        assert grown.verifier().person(access.identity.certificate).name == access.identity.name


def test_a_name_is_given_once_until_it_is_revoked(authority: Authority) -> None:
    first = authority.issue("alps", "p", "worker")
    with pytest.raises(UsageError, match="already"):
        authority.issue("alps", "p", "worker")
    gone = authority.revoke("alps")
    serial = first.verifier().person(first.identity.certificate).serial
    assert int(gone.serial, 16) == serial
    assert read_revoked(authority.folder / "revoked.json") == (serial,)
    assert authority.issue("alps", "p", "worker").identity.slot == "m002"
    with pytest.raises(UnknownNameError):
        authority.revoke("nobody")


def test_a_renewed_member_keeps_its_slot_and_is_revoked_whole(authority: Authority) -> None:
    old = authority.issue("a", "p", "worker", days=1)
    new = authority.renew("a", days=30)
    assert (new.identity.slot, new.identity.name) == (old.identity.slot, "a")
    assert new.certificate != old.certificate
    verifier = new.verifier()
    both = [verifier.person(access.identity.certificate) for access in (old, new)]
    assert both[0].expires_s < both[1].expires_s
    assert [m.name for m in Authority(authority.folder).members].count("a") == 1
    authority.revoke("a")
    serials = read_revoked(authority.folder / "revoked.json")
    assert sorted(serials) == sorted(person.serial for person in both)
    with pytest.raises(UnknownNameError):
        authority.renew("a")


def test_hubs_can_be_added_up_to_the_most(authority: Authority) -> None:
    before = authority.issue("a", "p", "worker")
    with pytest.raises(UsageError, match="already"):
        authority.add_hub(authority.hubs[0])
    for number in range(len(authority.hubs), 5):
        access = Access.open(f"@{authority.add_hub(f'hub{number}.example:7447')}")
        assert (access.identity.slot, access.identity.role) == (f"h{number}", "hub")
    with pytest.raises(UsageError, match="1 to 5"):
        authority.add_hub("one-more.example:7447")
    after = authority.renew("a")
    assert after.hubs[: len(before.hubs)] == before.hubs
    assert len(after.hubs) == 5


def test_nobody_is_issued_a_hubs_role(authority: Authority) -> None:
    with pytest.raises(UnknownNameError):
        authority.issue("x", "p", "hub")


def test_damaged_files_are_named(authority: Authority) -> None:
    (authority.folder / "fabric.json").write_text("{}")
    with pytest.raises(InputError, match=r"fabric\.json"):
        Authority(authority.folder)
    (authority.folder / "revoked.json").write_text('["xyz"]')
    with pytest.raises(InputError, match="revoked"):
        read_revoked(authority.folder / "revoked.json")
