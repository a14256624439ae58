from __future__ import annotations

import hashlib
import math

import pytest

from atoll.core.errors import InputError
from atoll.runtime.accounts.api_keys import (
    ApiKey,
    ModelFilter,
    NewKey,
    make_key,
    matches,
    read_bearer,
)


def held(digest: str, key_id: str, **more: object) -> ApiKey:
    return ApiKey(key_id, NewKey.parse({"name": "n", **more}), 0.0, None, 1, digest)


def test_a_key_is_recognised_and_nothing_else_is() -> None:
    text, key_id, digest = make_key()
    given = read_bearer(f"Bearer {text}".encode())
    assert given is not None
    assert given.id == key_id
    assert matches(held(digest, key_id), given)
    assert not matches(None, given)
    other_text, _, other_digest = make_key()
    assert not matches(held(other_digest, key_id), given)
    swapped = read_bearer(f"bearer  {text[:19]}{other_text[19:]}".encode())
    assert swapped is not None
    assert swapped.id == key_id
    assert not matches(held(digest, key_id), swapped)


def test_a_secret_has_256_bits_and_only_its_hash_is_kept() -> None:
    text, key_id, digest = make_key()
    _, shown_id, secret = text.split("-")
    assert shown_id == key_id
    assert len(secret) * math.log2(62) >= 256
    assert digest == hashlib.sha256(secret.encode()).hexdigest()
    assert len({make_key()[0] for _ in range(200)}) == 200


def test_neither_secret_nor_hash_is_in_a_repr() -> None:
    text, key_id, digest = make_key()
    secret = text.split("-")[2]
    given = read_bearer(b"Bearer " + text.encode())
    shown = repr(held(digest, key_id))
    assert digest not in shown
    assert secret not in shown
    assert given is not None
    assert secret not in repr(given)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-123",
        b"Basic YTpi",
        b"Bearer atoll-abc-def",
        pytest.param(b"Bearer " + make_key()[0].encode() + b"x", id="too long"),
        pytest.param(make_key()[0].encode(), id="without its scheme"),
        b"\xff" * 20,
    ],
)
def test_what_is_no_key_is_none(header: bytes) -> None:
    assert read_bearer(header) is None


def test_models_are_names_or_patterns() -> None:
    some = ModelFilter(("llama-*", "org/exact.v1"))
    assert some.allow("llama-3")
    assert some.allow("org/exact.v1")
    assert not some.allow("Llama-3")
    assert not some.allow("org/exactXv1")
    assert not some.allow("xllama-3")
    assert ModelFilter(()).allow("anything")


def test_models_do_not_remember_without_bound() -> None:
    some = ModelFilter(("a*",))
    for number in range(5000):
        assert some.allow(f"a{number}")
    assert len(some._known) <= 1024


def test_the_state_of_a_key() -> None:
    key = held("0" * 64, "k", expires_s=100.0)
    assert key.state(99.9) == "active"
    assert key.state(100.0) == "expired"
    revoked = ApiKey("k", key.spec, 0.0, 50.0, 1)
    assert revoked.state(60.0) == "revoked"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "two\nlines"),
        ("name", "x" * 121),
        ("role", "root"),
        ("tokens_per_day", "many"),
        ("models", ("",)),
        ("requests_per_min", 0),
        ("tokens_per_day", -1),
        ("concurrent", 0),
    ],
)
def test_nonsense_is_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        NewKey.parse({"name": "n", field: value})


def test_a_key_from_before_there_were_roles_is_a_members() -> None:
    assert NewKey.from_json('{"name":"x","owner":"me","models":[]}').role == "member"
    with pytest.raises(InputError, match="role"):
        NewKey.from_json('{"name":"x","role":"root"}')
