"""Where commands find API keys and what they used: a console, or the database where none is to be asked.

Named databases are opened. Otherwise the console that runs here (or at --console) is asked where its gateway
has keys; where there is none, the user's own database is opened: keys are made before a gateway runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from atoll.cli.console_client import ConsoleClient
from atoll.core.errors import AtollError, UsageError

if TYPE_CHECKING:
    from atoll.runtime.accounts.api_keys import ApiKey, NewKey
    from atoll.runtime.accounts.database import Database
    from atoll.runtime.accounts.key_limits import Counted

T = TypeVar("T")
_KEYS = "/atoll/v1/keys"


class KeyStore(Protocol):
    """Keys, wherever they are."""

    def make(self, spec: NewKey) -> tuple[str, ApiKey]:
        """Make a key; return its text, which nobody can say again."""
        ...

    def list_all(self) -> tuple[ApiKey, ...]:
        """Return all keys."""
        ...

    def find(self, name: str) -> tuple[ApiKey, dict[str, Counted]]:
        """Return a key by its id or name, and what it used `today`, in `this_month` and in `total`."""
        ...

    def revoke(self, name: str) -> ApiKey:
        """Make a key useless for good."""
        ...


def find_keys(db: str | None, console: str | None) -> KeyStore:
    """Return the keys that a command means; see the module."""
    client = find_accounts(db, console)
    return DatabaseKeys(db) if client is None else ConsoleKeys(client)


def find_accounts(db: str | None, console: str | None) -> ConsoleClient | None:
    """Return the console to ask, where no database is named and its gateway has keys and usage."""
    if db is not None and console is not None:
        hint = "leave one out; both may come from the environment"
        raise UsageError("a console or a database, not both", field="--db", hint=hint)
    if db is not None:
        return None
    client = ConsoleClient.find_fleets(console)
    if client.states is not None:
        return None
    accounts = client.ask("GET", "/atoll/v1/session")["accounts"]
    if not accounts and console is not None:
        raise AtollError("the gateway behind this console has no keys, and writes no usage down")
    return client if accounts else None


@dataclass(frozen=True, slots=True)
class ConsoleKeys:
    """Keys as a console tells of them (`KeyStore`)."""

    client: ConsoleClient

    def make(self, spec: NewKey) -> tuple[str, ApiKey]:
        """See `KeyStore.make`."""
        from atoll.runtime.accounts.api_keys import ApiKey

        made = self.client.ask("POST", _KEYS, spec.model_dump(mode="json", exclude_none=True))
        return str(made["key"]), ApiKey.read(made)

    def list_all(self) -> tuple[ApiKey, ...]:
        """See `KeyStore.list_all`."""
        from atoll.runtime.accounts.api_keys import ApiKey

        return tuple(ApiKey.read(each) for each in self._list())

    def find(self, name: str) -> tuple[ApiKey, dict[str, Counted]]:
        """See `KeyStore.find`."""
        from atoll.runtime.accounts.api_keys import ApiKey, choose_key
        from atoll.runtime.accounts.key_limits import Counted

        said = {each["id"]: each for each in self._list()}
        key = choose_key([ApiKey.read(each) for each in said.values()], name)
        used = said[key.id]["used"]
        named = {"today": "today", "this_month": "month", "total": "total"}
        return key, {
            shown: Counted(
                used[period]["tokens"],
                round(used[period]["audio_seconds"] * 1000),
                used[period]["pixels"],
            )
            for shown, period in named.items()
        }

    def revoke(self, name: str) -> ApiKey:
        """See `KeyStore.revoke`."""
        from atoll.runtime.accounts.api_keys import ApiKey, choose_key

        key = choose_key(self.list_all(), name)
        return ApiKey.read(self.client.ask("DELETE", f"{_KEYS}/{quote(key.id, safe='')}"))

    def _list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.ask("GET", _KEYS)["keys"]
        return found


@dataclass(frozen=True, slots=True)
class DatabaseKeys:
    """Keys of a database (`KeyStore`); without a URL the user's own."""

    url: str | None

    def make(self, spec: NewKey) -> tuple[str, ApiKey]:
        """See `KeyStore.make`."""
        return with_database(self.url, lambda database: database.create_key(spec))

    def list_all(self) -> tuple[ApiKey, ...]:
        """See `KeyStore.list_all`."""
        return with_database(self.url, lambda database: database.keys())

    def find(self, name: str) -> tuple[ApiKey, dict[str, Counted]]:
        """See `KeyStore.find`."""
        return with_database(self.url, lambda database: _find_used(database, name))

    def revoke(self, name: str) -> ApiKey:
        """See `KeyStore.revoke`."""

        async def end(database: Database) -> ApiKey:
            return await database.revoke_key((await database.key(name)).id)

        return with_database(self.url, end)


async def _find_used(database: Database, name: str) -> tuple[ApiKey, dict[str, Counted]]:
    import time

    from atoll.runtime.accounts.key_limits import NOTHING, TOTAL, periods

    key = await database.key(name)
    now = periods(time.time())
    named = {"today": now.day, "this_month": now.month, "total": TOTAL}
    used = (await database.counters([key.id], tuple(named.values()))).get(key.id, {})
    return key, {name: used.get(period, NOTHING) for name, period in named.items()}


def with_database(url: str | None, use: Callable[[Database], Awaitable[T]]) -> T:
    """Open the database that a command means, use it and close it."""
    # First: it says what to install where that is missing.
    from atoll.runtime.accounts.database import FAULTS, Database, default_url, unusable

    named = url or default_url()

    async def run() -> T:
        database = await Database.open(named)
        try:
            return await use(database)
        except FAULTS as error:
            raise unusable(named, error) from None
        finally:
            await database.close()

    return asyncio.run(run())
