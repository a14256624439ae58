"""Tokens and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UsageError
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import PREFIX, Access, is_loopback, parse_address, split_address
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.peers import Load, decode_load, encode_load
from atoll.fabric.transport.hub import hub_options


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    folder = tmp_path_factory.mktemp("fabric")
    return Authority.create(folder / "f", "test", ["hub.example", "[::1]:9000"]).issue(
        "alps", "ethz", "worker"
    )


def test_a_token_holds_everything(access: Access, tmp_path: Path) -> None:
    token = access.pack()
    assert token.startswith(PREFIX)
    assert len(token) < 2000
    assert Access.open(token) == access
    assert Access.open(f"  {token}\n") == access
    file = tmp_path / "fabric.token"
    file.write_text(f"# of alps\n{token[:100]}\n{token[100:]}\n")
    for text in (f"@{file}", str(file), str(tmp_path)):
        assert Access.open(text) == access
    assert access.hubs == ("hub.example:7447", "[::1]:9000")


def test_the_environment_names_the_fabric(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_FABRIC", access.pack())
    assert Access.open() == access
    monkeypatch.delenv("ATOLL_FABRIC")
    with pytest.raises(UsageError, match="ATOLL_FABRIC"):
        Access.open()


def test_a_key_is_never_shown(access: Access) -> None:
    assert access.key is not None
    shown = repr(access) + repr(access.identity)
    assert access.key.hex() not in shown
    assert repr(access.key)[2:-1] not in shown


@given(at=st.integers(0, 5000), to=st.characters(codec="ascii"))
def test_a_damaged_token_is_an_input_error(access: Access, at: int, to: str) -> None:
    token = access.pack()
    at %= len(token)
    damaged = token[:at] + to + token[at + 1 :]
    if damaged != token and damaged.strip() != token:
        with pytest.raises(InputError):
            Access.unpack(damaged)


def test_a_token_has_one_spelling(access: Access) -> None:
    token = access.pack()
    other = token[: len(PREFIX)] + token[len(PREFIX) :].translate({ord("-"): "+", ord("_"): "/"})
    assert other != token
    for damaged in (other, token + "="):
        with pytest.raises(InputError, match="damaged"):
            Access.unpack(damaged)


@pytest.mark.parametrize("cut", [1, 10, 500])
def test_a_shortened_token_is_an_input_error(access: Access, cut: int) -> None:
    with pytest.raises(InputError):
        Access.open(access.pack()[:-cut])


def test_a_token_with_another_members_key_is_refused(access: Access, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "f", "test", ["h"]).issue("x", "p", "worker")
    mixed = Access(
        access.fabric_id, access.hubs, access.authority, access.certificate, other.key, 256
    )
    with pytest.raises(InputError, match="does not belong"):
        Access.unpack(mixed.pack())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hub", "hub:7447"),
        ("hub:80", "hub:80"),
        ("10.0.0.1:9", "10.0.0.1:9"),
        ("[::1]:9", "[::1]:9"),
        ("[::1]", "[::1]:7447"),
        ("fe80::1", "[fe80::1]:7447"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert parse_address(text) == address
    assert split_address(address)[1] > 0


@pytest.mark.parametrize("text", ["", ":80", "hub:0", "hub:x", "hub:70000", "a b:1", "http://h:1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InputError, match="address"):
        parse_address(text)


def test_open_fabrics_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_INSECURE", raising=False)
    assert Access.open("open://127.0.0.1:9").is_open
    with pytest.raises(UsageError, match="anybody"):
        Access.open("open://10.0.0.1:9")
    assert Access.open_at(["10.0.0.1:9"], insecure=True).is_open
    with pytest.raises(UsageError, match="anybody"):
        hub_options(None, listen=["0.0.0.0:7447"])
    assert hub_options(None, listen=["0.0.0.0:7447"], insecure=True).listen == ("0.0.0.0:7447",)
    assert hub_options(None).listen == ("127.0.0.1:7447",)
    assert not is_loopback("0.0.0.0:1")


def test_a_hub_needs_a_hubs_token(access: Access) -> None:
    with pytest.raises(UsageError, match="not of a hub"):
        hub_options(access.pack())


def test_keys_name_their_writer() -> None:
    sid = keys.new_sid("m001", bytes(range(8)))
    assert keys.is_sid(sid)
    assert not keys.is_sid(f"m1-{'0' * 16}")
    for make in (keys.alive, keys.reg, keys.sync, keys.load, keys.req, keys.assign):
        assert keys.sender_of(make(sid)) == "m001"
        assert keys.own_sid(make(sid)) == sid
    assert keys.sender_of(keys.inward(sid, "m002")) == "m002"
    assert keys.sender_of(keys.outward(sid, "m002", "7")) == "m002"
    assert keys.own_sid(keys.outward(sid, "m002", "7")) is None


def test_a_slot_has_one_name() -> None:
    names = [keys.member_slot(number) for number in range(keys.MAX_SLOTS)]
    assert (len(set(names)), names[0], names[-1]) == (10_000, "m000", "m9999")
    assert all(keys.is_slot(name) and keys.is_sid(f"{name}-{'0' * 16}") for name in names)
    for wrong in ("m00", "m0000", "m0999", "m10000", "m", "h5", "h00", "m1000/", "m1000\n"):
        assert not keys.is_slot(wrong)
        assert not keys.is_sid(f"{wrong}-{'0' * 16}")


def test_revoked_slots_have_no_rules() -> None:
    rules = keys.hub_rules(3, frozenset({"m001"}))
    assert "m001" not in str(rules)
    assert "m000" in str(rules)
    assert rules["default_permission"] == "deny"


@given(st.binary(max_size=40))
def test_load_samples_are_read_or_dropped(data: bytes) -> None:
    assert decode_load(encode_load(Load(running=3, kv_used=0.5))) == Load(running=3, kv_used=0.5)
    assert decode_load(data) is None or isinstance(decode_load(data), Load)
