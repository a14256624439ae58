"""API keys over HTTP: list, make, change, revoke. Of secrets only the one answer knows that makes a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from pydantic import Field

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.runtime.accounts.api_keys import ApiKey, DescribedKey, NewKey
from atoll.runtime.accounts.grants import role_forbids_error
from atoll.runtime.accounts.key_limits import NOTHING, TOTAL, Counted, Periods, periods
from atoll.runtime.gateway.console.route import LATEST_S, ConsoleCall, ConsoleRoute, show
from atoll.runtime.http.api_route import NoQuery, read_object
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError

_BODY_BYTES = 64 * 2**10
_AT_A_TIME = 100
"""Keys that are described before requests have their turn."""
_NEVER: Mapping[str, Counted] = {}


class KeyChange(NewKey):
    """Fields of a key that are to be others; null takes a limit away."""

    name: str = Field("x", min_length=1, max_length=120)


class UsedByKey(TypedDict):
    """What a key has used in a period."""

    tokens: int
    audio_seconds: float
    pixels: int


class UsedInPeriods(TypedDict):
    """What a key has used today, in this month (UTC) and ever."""

    today: UsedByKey
    month: UsedByKey
    total: UsedByKey


class ShownKey(DescribedKey):
    """A key with what it has used, and whether it is the caller's own."""

    used: UsedInPeriods
    own: bool


class MadeKey(ShownKey):
    """A key that was just made, with its text."""

    key: str


class KeyList(TypedDict):
    """Keys, the oldest first."""

    keys: list[ShownKey]


async def show_keys(call: ConsoleCall) -> Response:
    """List the keys with what they used; to members, their own."""
    accounts, caller = call.accounts, call.caller
    call.query(NoQuery)
    keys = [key for key in accounts.keys if caller.role != "member" or caller.owns(key)]
    # Each is written by itself: all of ten thousand at once would hold up requests.
    return show(
        {"keys": [msgspec.Raw(msgspec.json.encode(k)) async for k in _describe(call, keys)]}
    )


async def make_key(call: ConsoleCall) -> Response:
    """Make a key; its text is in this answer, and nowhere else."""
    accounts = call.accounts
    fields = _fields(call)
    try:
        spec = _check(NewKey.parse(fields))
        async with call.gate.enter(call.caller.key_id):
            text, key = await accounts.database.create_key(spec)
            await accounts.learn_keys()
    except InputError as error:
        raise _bad_field(error) from None
    _note(call, "key.made", key)
    shown = await _describe_one(call, key)
    return show({"key": text} | shown, 201)


async def change_key(call: ConsoleCall) -> Response:
    """Change some fields of a key; its text, and what it used, stay."""
    accounts = call.accounts
    fields = _fields(call)
    if not fields:
        raise ApiError(400, "the body names no field to change")
    try:
        # What cannot be is refused before the database is asked; what others change meanwhile counts there.
        _check(KeyChange.parse(fields))
        async with call.gate.enter(call.caller.key_id):
            key = await accounts.database.change_key(call.name, fields)
            await accounts.learn_keys()
    except InputError as error:
        raise _bad_field(error) from None
    except UsageError as error:
        raise ApiError(400, str(error)) from None
    except UnknownNameError:
        raise _unknown(call.name) from None
    _note(call, "key.changed", key, fields=sorted(fields))
    shown = await _describe_one(call, key)
    return show(shown)


async def revoke_key(call: ConsoleCall) -> Response:
    """Make a key useless for good: here at once, at other gateways within about a second."""
    accounts, caller = call.accounts, call.caller
    call.query(NoQuery)
    async with call.gate.enter(call.caller.key_id):
        if accounts.key(call.name) is None:
            await accounts.learn_keys()
        known = accounts.key(call.name)
        if caller.role != "admin" and (known is None or not caller.owns(known)):
            # Whether there is such a key is nobody else's business.
            raise role_forbids_error(f"A {caller.role} revokes only keys of its own.")
        if known is None:
            raise _unknown(call.name)
        key = await accounts.database.revoke_key(known.id)
        await accounts.learn_keys()
    _note(call, "key.revoked", key)
    shown = await _describe_one(call, key)
    return show(shown)


async def _describe_one(call: ConsoleCall, key: ApiKey) -> dict[str, Any]:
    """Return a key as it is shown."""
    [shown] = [shown async for shown in _describe(call, [key])]
    return shown


async def _describe(call: ConsoleCall, keys: Sequence[ApiKey]) -> AsyncIterator[dict[str, Any]]:
    """Yield keys as they are shown, with what they used; requests have their turn in between."""
    now_s = time.time()
    now = periods(now_s)
    async with call.gate.enter(call.caller.key_id):
        ids = [key.id for key in keys]
        used_by_key = await call.accounts.database.counters(ids, (now.day, now.month, TOTAL))
    for number, key in enumerate(keys, 1):
        if number % _AT_A_TIME == 0:
            await asyncio.sleep(0)
        used = _used(used_by_key.get(key.id, _NEVER), now)
        yield key.describe(now_s) | {"used": used, "own": call.caller.owns(key)}


def _used(counted: Mapping[str, Counted], now: Periods) -> dict[str, dict[str, float]]:
    shown = {}
    for name, period in (("today", now.day), ("month", now.month), ("total", TOTAL)):
        used = counted.get(period, NOTHING)
        shown[name] = {
            "tokens": used.tokens,
            "audio_seconds": used.audio_ms / 1000,
            "pixels": used.pixels,
        }
    return shown


def _fields(call: ConsoleCall) -> dict[str, object]:
    """Return the JSON object in the body."""
    call.query(NoQuery)
    body = call.request.body
    if len(body) > _BODY_BYTES:
        raise ApiError(
            413, f"a key takes at most {_BODY_BYTES} bytes of JSON", code="request_too_large"
        )
    return read_object(body)


def _check(spec: NewKey) -> NewKey:
    if spec.expires_s is not None and spec.expires_s > LATEST_S:
        hint = "leave it out for a key that does not expire"
        raise InputError("this is too far ahead", field="expires_s", hint=hint)
    return spec


def _bad_field(error: InputError) -> ApiError:
    return ApiError(400, str(error), param=error.field)


def _unknown(key_id: str) -> ApiError:
    return ApiError(404, f"there is no key {key_id[:100]!r}", code="not_found")


def _note(call: ConsoleCall, event: str, key: ApiKey, **more: object) -> None:
    call.context.log.event(event, key=key.id, by=call.caller.label, **more)


ROUTES = (
    ConsoleRoute(
        *("GET", "keys", "viewer", show_keys, "Keys without their secrets; for members, own ones"),
        gives=KeyList,
    ),
    ConsoleRoute(
        *("POST", "keys", "admin", make_key, "Make a key, whose text is shown this once"),
        takes=NewKey,
        gives=MadeKey,
        status=201,
    ),
    ConsoleRoute(
        *("PATCH", "keys/{id}", "admin", change_key, "Change a key"),
        takes=KeyChange,
        gives=ShownKey,
    ),
    ConsoleRoute(
        *("DELETE", "keys/{id}", "member", revoke_key),
        "Revoke a key; others than admins, own ones",
        gives=ShownKey,
    ),
)
