"""Who asks: what headers can and cannot make of a caller."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.roles import ROLES, Role
from atoll.runtime.accounts.api_keys import ApiKey, NewKey
from atoll.runtime.accounts.grants import unknown_key_error
from atoll.runtime.gateway.console.console_caller import ADMIN, Caller, find_caller, lower
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts

TOKEN = "t0ken"


def key(name: str, role: Role = "member", owner: str = "") -> ApiKey:
    return ApiKey(name, NewKey(name=name, role=role, owner=owner), 0.0, None, 1)


def accounts(*keys: ApiKey) -> Accounts:
    """Stand in for accounts whose keys are shown by their ids; `Bearer gone` is revoked."""
    known = {f"Bearer {k.id}".encode(): k for k in keys}

    def identify(authorization: bytes | None) -> ApiKey | None:
        if authorization == b"Bearer gone":
            raise unknown_key_error("This API key is revoked.")
        return known.get(authorization or b"")

    return cast("Accounts", SimpleNamespace(identify=identify))


KEYS = accounts(key("a", "admin", "root"), key("m", "member", "ada"), key("v", "viewer"), key("n"))
ROLE_OF: dict[str, Role] = {"a": "admin", "m": "member", "v": "viewer", "n": "member"}

shown = st.sampled_from(
    ["", "Bearer a", "Bearer m", "Bearer v", "Bearer n", "Bearer gone"]
) | st.sampled_from(
    [f"Bearer {TOKEN}", f"bearer {TOKEN}", TOKEN, f"Bearer {TOKEN} ", "Basic cm9vdA==", "Bearer"]
)
roles = st.sampled_from(
    ["admin", "member", "viewer", "Admin", " admin", "admin,member", "", "root"]
)
owners = st.sampled_from(["", "ada", "root", "x" * 121, "a\tb", "*"]) | st.text(max_size=5)
more = st.dictionaries(
    st.sampled_from(["x-forwarded-for", "x-atoll-user", "x-role", "x-atoll-admin", "cookie"]),
    st.sampled_from(["127.0.0.1", "admin", "1"]),
)


@given(
    authorization=shown,
    role=st.none() | roles,
    owner=st.none() | owners,
    others=more,
    token=st.sampled_from([None, TOKEN]),
    known=st.sampled_from([None, KEYS]),
)
def test_no_headers_raise_a_role(
    authorization: str,
    role: str | None,
    owner: str | None,
    others: dict[str, str],
    token: str | None,
    known: Accounts | None,
) -> None:
    """Whatever is sent besides: only the token and an admin's key make an admin, and a key is itself."""
    headers = {name.encode(): value.encode() for name, value in others.items()}
    headers[b"authorization"] = authorization.encode()
    if role is not None:
        headers[b"x-atoll-role"] = role.encode()
    if owner is not None:
        headers[b"x-atoll-owner"] = owner.encode()
    try:
        caller = find_caller(headers, token, known)
    except ApiError:
        return
    is_token = token is not None and authorization == f"Bearer {TOKEN}"
    if is_token or authorization == "Bearer a":
        assert is_token or known is not None
        assert caller.role == (role or "admin")
        assert owner is None or (caller.owner == owner and caller.key_id is None)
    else:
        name = authorization.removeprefix("Bearer ")
        assert known is not None
        assert (caller.role, caller.key_id) == (ROLE_OF[name], name)
        assert role is None
        assert owner is None


def test_strangers_are_told_what_they_were_before() -> None:
    for known, sent in itertools.product((None, KEYS), ({}, {b"authorization": b"Bearer x"})):
        with pytest.raises(ApiError) as none:
            find_caller(sent, None, known)
        assert (none.value.status, none.value.kind) == (403, "permission_error")
        with pytest.raises(ApiError) as wrong:
            find_caller(sent, TOKEN, known)
        assert (wrong.value.status, wrong.value.kind) == (401, "authentication_error")


def test_a_key_that_does_not_work_says_so() -> None:
    for token in (None, TOKEN):
        with pytest.raises(ApiError) as gone:
            find_caller({b"authorization": b"Bearer gone"}, token, KEYS)
        assert (gone.value.status, gone.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("role", ROLES)
def test_an_admin_speaks_for_others(role: Role) -> None:
    headers = {b"x-atoll-role": role.encode()}
    assert lower(ADMIN, headers) == Caller(role)
    # Zoë: names travel as UTF-8.
    headers[b"x-atoll-owner"] = "zoë@lab".encode()
    assert lower(Caller("admin", "a", "root", "n"), headers) == Caller(role, None, "zoë@lab")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        # An owner alone would leave all rights to somebody who should have few.
        ({b"x-atoll-owner": b"ada"}, "x-atoll-role"),
        ({b"x-atoll-role": b"root"}, "x-atoll-role"),
        ({b"x-atoll-role": b""}, "x-atoll-role"),
        ({b"x-atoll-role": b"member", b"x-atoll-owner": b"\xff"}, "x-atoll-owner"),
        ({b"x-atoll-role": b"member", b"x-atoll-owner": b"a" * 121}, "x-atoll-owner"),
        ({b"x-atoll-role": b"member", b"x-atoll-owner": b"a\x00"}, "x-atoll-owner"),
    ],
)
def test_what_says_nothing_clear_is_refused(headers: dict[bytes, bytes], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        lower(ADMIN, headers)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_header", param)


@pytest.mark.parametrize("role", ["member", "viewer"])
@pytest.mark.parametrize("said", ROLES)
def test_nobody_else_speaks_for_others(role: Role, said: Any) -> None:
    """Not even for less: a viewer sees keys that a member does not."""
    for headers in ({b"x-atoll-role": said.encode()}, {b"x-atoll-owner": b"ada"}):
        with pytest.raises(ApiError) as refused:
            lower(Caller(role, "m", "ada"), headers)
        assert (refused.value.status, refused.value.code) == (403, "role_forbids")


def test_own_keys() -> None:
    ada, nobody = key("1", owner="ada"), key("2")
    assert Caller("member", "9", "ada").owns(ada)
    assert not Caller("member", "9", "Ada").owns(ada)
    assert Caller("member", "2").owns(nobody)
    # Keys of no owner are not each other's, and nobody's for whom an admin speaks.
    assert not Caller("member", "3").owns(nobody)
    assert not Caller("member", None, "").owns(nobody)
    assert not Caller("member", None, "").owns(ada)
