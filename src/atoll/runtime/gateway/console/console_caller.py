"""Who asks under `/atoll/v1/`: an admin by the socket or the token, or an API key by its role.

An admin may lower that for one request (`x-atoll-role`, and `x-atoll-owner` with it): a page in front passes
on who is logged in. Nobody else may send these headers, so nothing in them can give anybody a right.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.roles import ROLES, Role
from atoll.runtime.accounts.api_keys import ApiKey
from atoll.runtime.accounts.grants import role_forbids_error
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts

_ROLE = b"x-atoll-role"
_OWNER = b"x-atoll-owner"
_OWNER_LENGTH = 120
_ROLES: dict[bytes, Role] = {role.encode(): role for role in ROLES}


class Caller(NamedTuple):
    """Who asks."""

    role: Role
    key_id: str | None = None
    """None: no key, or somebody whom an admin speaks for."""
    owner: str = ""
    name: str = ""
    """Of the key."""

    def owns(self, key: ApiKey) -> bool:
        """Whether a key is this caller's own: of the same owner, or itself."""
        return key.id == self.key_id or (self.owner != "" and key.spec.owner == self.owner)

    @property
    def label(self) -> str:
        """Name of the caller in the log."""
        return self.key_id or self.owner or "admin"


ADMIN = Caller("admin")
"""Whoever may open the admin socket, or has the admin token."""


def find_caller(
    headers: Mapping[bytes, bytes], admin_token: str | None, accounts: Accounts | None
) -> Caller:
    """Return who asks on the public port, or raise 400, 401 or 403."""
    authorization = headers.get(b"authorization", b"")
    if admin_token is not None and hmac.compare_digest(
        authorization, b"Bearer " + admin_token.encode()
    ):
        return lower(ADMIN, headers)
    key = None if accounts is None else accounts.identify(authorization)
    if key is not None:
        return lower(Caller(key.spec.role, key.id, key.spec.owner, key.spec.name), headers)
    if admin_token is None:
        raise ApiError(
            403,
            "this is not served here: ask on the admin socket, or set admin_token",
            kind="permission_error",
        )
    raise ApiError(401, "a valid admin token is needed", kind="authentication_error")


def lower(caller: Caller, headers: Mapping[bytes, bytes]) -> Caller:
    """Return whom a caller speaks for; 403 for whoever is no admin and says so, 400 for what is no role."""
    role, owner = headers.get(_ROLE), headers.get(_OWNER)
    if role is None and owner is None:
        return caller
    if caller.role != "admin":
        raise role_forbids_error(
            f"Only admins speak for others: leave {_ROLE.decode()} and {_OWNER.decode()} out."
        )
    lowered = None if role is None else _ROLES.get(role)
    if lowered is None:
        # An owner alone is refused, too: whoever forgets the role would pass on all rights.
        raise _bad_header(_ROLE, f"is one of {', '.join(ROLES)}")
    if owner is None:
        return caller._replace(role=lowered)
    try:
        text = owner.decode()
    except UnicodeDecodeError:
        raise _bad_header(_OWNER, "is UTF-8") from None
    if len(text) > _OWNER_LENGTH or not text.isprintable():
        raise _bad_header(_OWNER, f"has at most {_OWNER_LENGTH} printable characters")
    return Caller(lowered, None, text)


def _bad_header(name: bytes, what: str) -> ApiError:
    return ApiError(
        400, f"the header {name.decode()} {what}", param=name.decode(), code="invalid_header"
    )
