"""Roles: what somebody may do, from a key, a login or a proxy's word, wherever that is asked."""

from __future__ import annotations

from typing import Literal, get_args

from atoll.core.errors import InputError

Role = Literal["viewer", "member", "operator", "admin"]
"""Viewers look, members also ask models and look after what is their own, operators also run fleets and
machines, admins change everything."""
ROLES: tuple[Role, ...] = get_args(Role)
"""The least first."""
_RANK: dict[str, int] = {role: rank for rank, role in enumerate(ROLES)}
_BY_NAME: dict[str, Role] = {role: role for role in ROLES}


def find_role(name: str) -> Role | None:
    """Return the role of this name, or None."""
    return _BY_NAME.get(name)


def read_role(text: str) -> Role:
    """Read a role that somebody wrote."""
    role = find_role(text)
    if role is None:
        raise InputError(f"{text!r} is no role", hint=f"one of {', '.join(ROLES)}")
    return role


def may(role: Role, least: Role) -> bool:
    """Whether a role has the rights of another one."""
    return _RANK[role] >= _RANK[least]
