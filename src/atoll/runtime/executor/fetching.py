"""Handles in, arrays out: mapped where they are on this host, fetched once where they are elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.runtime.executor.arrays import (
    Array,
    LostHandleError,
    flat_bytes,
    list_handles,
    map_file,
    open_handle,
    replace_handles,
)
from atoll.runtime.executor.executor_client import (
    Dial,
    ExecutorClient,
    ExecutorLostError,
    InvocationError,
)
from atoll.runtime.executor.nixl_wire import NixlWire
from atoll.runtime.executor.store import CACHE, ArrayStore, StoreFullError
from atoll.tasks.values import Handle, Value

_LOG = logging.getLogger(__name__)
_CACHE_S = 60.0
"""How long a fetched array is kept after it was last used."""
_AT_ONCE = 4
_MAPPED_AT_ONCE_BYTES = 4 * 2**20
"""Larger files are mapped in a thread, so that nobody waits for pages to come from a disk."""


class HandleResolver:
    """Opens the handles that invocations bring.

    Arrays of other hosts are asked of the address that their handle names, with the token that all
    executors of a fleet share.
    """

    def __init__(
        self,
        store: ArrayStore,
        token: str,
        holder: str,
        dial: Dial = asyncio.open_connection,
        wire: NixlWire | None = None,
    ) -> None:
        self._store = store
        self._dial = dial
        self._wire = wire
        self._token = token
        self._holder = holder
        self._peers: dict[str, ExecutorClient] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, inputs: Mapping[str, Value]) -> dict[str, Any]:
        """Return inputs with an array for every handle; `LostHandleError` names one that is gone."""
        values = dict(inputs)
        handles = list_handles(values)
        if not handles:
            return values
        arrays = {handle.id: await self.open(handle) for handle in handles}
        opened: dict[str, Any] = replace_handles(values, lambda handle: arrays[handle.id])
        return opened

    async def open(self, handle: Handle) -> Array:
        """Return the array of a handle, not to be written to."""
        if handle.is_inline:
            return open_handle(handle)
        if (array := self._open_kept(handle)) is not None:
            return array
        with contextlib.suppress(LostHandleError):
            if handle.nbytes <= _MAPPED_AT_ONCE_BYTES:
                return open_handle(handle)
            return await asyncio.to_thread(open_handle, handle)
        fetching = self._fetches.get(handle.id)
        if fetching is None:
            fetching = asyncio.create_task(self._fetch(handle))
            self._fetches[handle.id] = fetching
            fetching.add_done_callback(lambda _: self._fetches.pop(handle.id, None))
        # One that gives up must not take it away from the others.
        await asyncio.shield(fetching)
        array = self._open_kept(handle)
        if array is None:
            raise LostHandleError(handle.id, "it was freed too early")
        return array

    async def close(self) -> None:
        """End what is fetched, and hang up."""
        for fetching in list(self._fetches.values()):
            fetching.cancel()
        for peer in self._peers.values():
            await peer.close()

    def _open_kept(self, handle: Handle) -> Array | None:
        kept = self._store.get(handle.id)
        if kept is None:
            return None
        if kept.owner != self._store.owner:
            self._store.renew([handle.id], CACHE, _CACHE_S)
        return map_file(replace(kept, dtype=handle.dtype, shape=handle.shape))

    async def _fetch(self, handle: Handle) -> None:
        if not handle.address or handle.owner == self._store.owner:
            raise LostHandleError(handle.id, "its lease has run out")
        if handle.nbytes > self._store.max_bytes:
            raise StoreFullError(
                f"an array of {handle.nbytes} bytes is too large for this executor"
            )
        async with self._turns:
            peer = self._peers.get(handle.address)
            if peer is None:
                peer = ExecutorClient(
                    handle.address, self._token, self._holder, dial=self._dial, wire=self._wire
                )
                self._peers[handle.address] = peer
            try:
                await peer.connect()
                array = await peer.fetch(handle)
            except (ExecutorLostError, InvocationError) as error:
                raise LostHandleError(handle.id, error.message) from error
            data = flat_bytes(array)
            await asyncio.to_thread(self._store.adopt, handle, data, _CACHE_S)
            _LOG.debug("fetched %d bytes from %s", handle.nbytes, handle.address)
