"""Arrays from one executor to another by NIXL: read from the memory of whoever has them, without its help.

An executor registers one block of memory and says so in its welcome (`metadata`). Asked for an array it lends
a piece of the block with a copy of it; the reader reads that into a piece of its own block and says that it
has it. Both blocks are bounded: where there is no room, or a read fails, the array goes over the connection.
Memory is registered once and stays until the end of the process, so nobody reads from what is not there; what
was read is summed up, since a piece that was lent too long may hold something else.

NIXL's agent is used by one thread alone, which rests while nothing is lent or read.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import os
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from atoll.core.errors import AtollError, InputError
from atoll.core.extras import require_extras
from atoll.runtime.executor.nixl_room import PieceRoom

NixlMode: TypeAlias = Literal["auto", "always", "never"]
"""Whether arrays go by NIXL: where both ends have it, or not at all else, or never."""
ROOM_BYTES = 128 * 2**20
"""The block of a process: what it lends and reads at once."""
MAX_METADATA = 2**16
"""The longest description of an agent that is believed; it takes some hundred bytes."""
_LEAST_BYTES = 2**18
"""Smaller arrays are there sooner over the connection."""
_PAUSE_S = 50e-6
_PUSHES = 32
"""How often the agent gets on before it rests again: without RDMA each time moves some kilobytes."""
_PATIENCE_S = 2.0
_LEAST_BYTES_PER_S = 20e6
_AGAIN_S = 60.0
"""After this an agent that could not be read from is tried again."""
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class NixlError(AtollError):
    """An array did not come by NIXL; it may come another way."""


class NixlAgent(Protocol):
    """What is used of `nixl._api.nixl_agent`."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Register memory for as long as the agent lives."""

    def get_agent_metadata(self) -> bytes:
        """Return what others need to read from here."""

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Return the name of another agent that can be read from now."""

    def remove_remote_agent(self, agent: str) -> Any:
        """Forget another agent."""

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        """Return places in memory as a transfer wants them."""

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str
    ) -> Any:
        """Return a transfer that has not begun."""

    def transfer(self, handle: Any) -> str:
        """Begin a transfer; returns "DONE", "PROC" or "ERR"."""

    def check_xfer_state(self, handle: Any) -> str:
        """Return how far a transfer is, as `transfer` does."""

    def release_xfer_handle(self, handle: Any) -> None:
        """End a transfer, whatever its state; raises where that cannot be."""

    def get_new_notifs(self) -> Any:
        """Have what others read here make progress."""


@dataclass(frozen=True, slots=True)
class Lent:
    """An array that others may read: where it lies, and the sum of its bytes."""

    offset: int
    address: int
    crc32: int


@dataclass(slots=True)
class _Read:
    """A read under way."""

    metadata: bytes
    handle: Any
    offset: int
    nbytes: int
    until_s: float
    done: Future[bytes]


class NixlWire:
    """The agent of a process and its block of memory.

    make_agent: called once, in the thread that then uses the agent. only: arrays go by NIXL or not at all.
    """

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        *,
        room_bytes: int = ROOM_BYTES,
        least_bytes: int = _LEAST_BYTES,
        only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metadata = b""
        self.only = only
        self._least_bytes = 0 if only else least_bytes
        self._clock = clock
        self._room = PieceRoom(room_bytes)
        # Zeroed pages are only there once they are written to.
        self._block = np.zeros(self._room.nbytes, np.uint8)
        self._bytes = self._block.data
        self._lock = threading.Lock()
        self._closed_until_s: dict[bytes, float] = {}
        self._agent: NixlAgent
        self._peers: dict[bytes, str] = {}
        self._reads: list[_Read] = []
        self._lent = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="nixl", daemon=True)
        self._thread.start()
        try:
            self.metadata = self._ask(lambda: self._begin(make_agent)).result()
        except BaseException:
            self.close()
            raise

    @property
    def taken_bytes(self) -> int:
        """Bytes of the block that are lent or read into."""
        with self._lock:
            return self._room.taken_bytes

    def may_read(self, metadata: bytes, nbytes: int) -> bool:
        """Return whether an array of another agent should be asked for this way."""
        if not 0 < len(metadata) <= MAX_METADATA:
            return False
        if not self._least_bytes <= nbytes <= self._room.nbytes:
            return False
        return self.only or self._closed_until_s.get(metadata, 0.0) <= self._clock()

    def forget(self, metadata: bytes) -> None:
        """Let go of an agent that is there no more."""
        self._closed_until_s.pop(metadata, None)
        self._tell(lambda: self._leave(metadata))

    async def lend(self, data: memoryview) -> Lent | None:
        """Copy bytes to where others may read them; None where there is no room."""
        offset = self._take(len(data))
        if offset is None:
            return None

        def fill() -> int:
            self._bytes[offset : offset + len(data)] = data
            return zlib.crc32(data)

        filling = asyncio.get_running_loop().run_in_executor(None, fill)
        try:
            crc32 = await asyncio.shield(filling)
        except BaseException:
            # It may still be written to.
            filling.add_done_callback(lambda _: self._give_back(offset))
            raise
        self._tell(lambda: self._count(1))
        return Lent(offset, self._block.ctypes.data + offset, crc32)

    def take_back(self, lent: Lent) -> None:
        """End a loan."""
        self._tell(lambda: self._count(-1))
        self._give_back(lent.offset)

    async def read(self, metadata: bytes, address: int, nbytes: int, crc32: int) -> bytes:
        """Return the bytes that another agent lends; NixlError if they do not come, or are others."""
        if not self.may_read(metadata, nbytes):
            raise NixlError("this agent is not read from")
        offset = self._take(nbytes)
        if offset is None:
            raise NixlError(f"there is no room for {nbytes} bytes more")
        done: Future[bytes] = Future()
        # Who waits for it may be cancelled, the read goes on.
        done.set_running_or_notify_cancel()
        self._tell(lambda: self._start(metadata, address, offset, nbytes, done))
        data = await asyncio.wrap_future(done)
        if await asyncio.to_thread(zlib.crc32, data) != crc32:
            raise NixlError("other bytes came than were lent")
        return data

    def close(self) -> None:
        """End the thread; reads under way fail."""
        self._jobs.put(None)
        self._thread.join()

    # In any thread

    def _take(self, nbytes: int) -> int | None:
        with self._lock:
            return self._room.take(nbytes)

    def _give_back(self, offset: int) -> None:
        with self._lock:
            self._room.give_back(offset)

    def _tell(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _ask(self, job: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - whoever asked has it
                future.set_exception(error)

        self._tell(run)
        return future

    # In the agent's thread

    def _work(self) -> None:
        job: Callable[[], None] | None
        while True:
            is_busy = bool(self._reads or self._lent)
            try:
                job = self._jobs.get(timeout=_PAUSE_S if is_busy else None)
                if job is None:
                    break
                job()
            except queue.Empty:
                pass
            for _ in range(_PUSHES):
                self._push()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job()
        for read in list(self._reads):
            self._fail(read, "it is being closed")

    def _push(self) -> None:
        """Have transfers get on: without a thread of its own the agent does so only when it is asked."""
        if self._lent:
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # noqa: BLE001 - readers see for themselves
                _LOG.debug("NIXL: %s", error)
        for read in list(self._reads):
            self._look_at(read)

    def _begin(self, make_agent: Callable[[], NixlAgent]) -> bytes:
        self._agent = make_agent()
        place = (self._block.ctypes.data, self._room.nbytes, 0, "")
        self._agent.register_memory([place], "DRAM")
        return self._agent.get_agent_metadata()

    def _count(self, more: int) -> None:
        self._lent += more

    def _start(
        self, metadata: bytes, address: int, offset: int, nbytes: int, done: Future[bytes]
    ) -> None:
        until_s = self._clock() + _PATIENCE_S + nbytes / _LEAST_BYTES_PER_S
        read = _Read(metadata, None, offset, nbytes, until_s, done)
        self._reads.append(read)
        try:
            peer = self._peers.get(metadata)
            if peer is None:
                name = self._agent.add_remote_agent(metadata)
                peer = name.decode() if isinstance(name, bytes) else str(name)
                self._peers[metadata] = peer
            here = self._agent.get_xfer_descs(
                [(self._block.ctypes.data + offset, nbytes, 0)], "DRAM"
            )
            there = self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            read.handle = self._agent.initialize_xfer("READ", here, there, peer)
            self._settle(read, self._agent.transfer(read.handle))
        except Exception as error:  # noqa: BLE001 - the array may still come another way
            self._fail(read, f"{type(error).__name__}: {error}")

    def _look_at(self, read: _Read) -> None:
        try:
            self._settle(read, self._agent.check_xfer_state(read.handle))
        except Exception as error:  # noqa: BLE001 - the array may still come another way
            self._fail(read, f"{type(error).__name__}: {error}")

    def _settle(self, read: _Read, state: str) -> None:
        if state == "DONE":
            data = bytes(self._bytes[read.offset : read.offset + read.nbytes])
            self._end(read)
            read.done.set_result(data)
        elif state != "PROC":
            self._fail(read, f"the transfer ended as {state}")
        elif self._clock() > read.until_s:
            self._fail(read, "it took too long")

    def _fail(self, read: _Read, why: str) -> None:
        self._end(read)
        self._closed_until_s[read.metadata] = self._clock() + _AGAIN_S
        self._leave(read.metadata)
        read.done.set_exception(NixlError(f"not read by NIXL: {why}"))

    def _leave(self, metadata: bytes) -> None:
        peer = self._peers.pop(metadata, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except Exception as error:  # noqa: BLE001 - it is read from no more in any case
                _LOG.debug("NIXL: %s", error)

    def _end(self, read: _Read) -> None:
        """Let go of a read; its piece is used again only if nothing can be written to it any more."""
        self._reads.remove(read)
        try:
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
        except Exception as error:  # noqa: BLE001 - the piece is lost, and the array comes another way
            _LOG.warning("NIXL keeps %d bytes: %s", read.nbytes, error)
            return
        self._give_back(read.offset)


def open_wire(mode: NixlMode, name: str, host: str) -> NixlWire | None:
    """Return the agent of a process, or None where arrays go over connections only.

    `host` is where the process listens: what listens on this machine alone hands no arrays to others.
    """
    if mode == "never" or (mode == "auto" and (_is_here(host) or find_spec("nixl") is None)):
        return None
    require_extras("nixl")
    # It would greet on standard output.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = importlib.import_module("nixl._api")

    def make_agent() -> NixlAgent:
        # An agent's own thread never rests; no two agents may ever have one name.
        about = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent: NixlAgent = api.nixl_agent(f"{name}-{secrets.token_hex(8)}", about)
        return agent

    try:
        return NixlWire(make_agent, only=mode == "always")
    except Exception as error:
        if mode == "always":
            hint = "say never, or see that UCX finds a network here"
            raise InputError(f"NIXL does not start: {error}", field="nixl", hint=hint) from error
        _LOG.warning("arrays go without NIXL, which does not start: %s", error)
        return None


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
