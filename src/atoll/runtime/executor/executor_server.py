"""The executor's door: who may come in, what each asks, and what they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.components.base import BadInputError
from atoll.core.errors import shorten
from atoll.runtime.executor.arrays import LostHandleError, flat_bytes, identify_host
from atoll.runtime.executor.executor_caller import CallerConnection, CallerGoneError
from atoll.runtime.executor.executor_client import Dial, InvocationError
from atoll.runtime.executor.executor_messages import CHUNK_BYTES as _CHUNK_BYTES
from atoll.runtime.executor.executor_messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    VERSION,
    ArrayChunk,
    ArrayLent,
    AskQueues,
    Cancel,
    ExecutorWelcome,
    Fetch,
    Finished,
    Invoke,
    Queues,
    ReleaseArrays,
    Renew,
    StreamPiece,
)
from atoll.runtime.executor.executor_wire import (
    FrameDecoder,
    WireError,
    decode_call,
    decode_hello,
    pack_value,
)
from atoll.runtime.executor.fetching import HandleResolver
from atoll.runtime.executor.nixl_wire import NixlWire
from atoll.runtime.executor.outputs import OutputSaver
from atoll.runtime.executor.store import CACHE, ArrayStore
from atoll.runtime.executor.workers import ComponentWorker, note_failure
from atoll.runtime.http.listen_address import cannot_listen
from atoll.tasks.values import Value

_LOG = logging.getLogger(__name__)
_READ_BYTES = 2**18
_EXPIRE_S = 0.5
_DRAIN_CHECK_S = 0.02
_MAX_HOLDER = 120
# A day: longer leases and deadlines are cut to this.
_MAX_S = 86400.0


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """How much callers may ask for.

    connections: at once. in_flight: invocations and fetches of one connection. input_bytes: memory that the
    inputs of all invocations may take together. hello_s: how long a caller may take to say who it is, and
    frame_s to send a frame it has begun. silent_s: how long it may take to read what it is sent, or lent.
    """

    connections: int = 256
    in_flight: int = 1024
    input_bytes: int = 256 * 2**20
    hello_s: float = 5.0
    frame_s: float = 60.0
    silent_s: float = 60.0


class ExecutorServer:
    """Takes invocations for workers, and gives arrays of its store to who asks for them.

    Without workers it is a store with a door: whoever makes arrays can have them fetched. wire: by NIXL, from
    those who have it, and to them.
    """

    def __init__(
        self,
        name: str,
        token: str,
        store: ArrayStore,
        workers: Mapping[str, ComponentWorker] | None = None,
        limits: DoorLimits | None = None,
        dial: Dial = asyncio.open_connection,
        wire: NixlWire | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.workers = dict(workers or {})
        self.draining = False
        self.connections: set[CallerConnection] = set()
        self._token = token.encode()
        self._limits = limits or DoorLimits()
        self._resolver = HandleResolver(store, token, name, dial, wire)
        self._wire = wire
        self._strangers = 0
        self._input_bytes = 0
        self._server: asyncio.Server | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the host and port listened on; handles made from now on name them."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_READ_BYTES)
        except OSError as error:
            raise cannot_listen(error, host, port, field="address") from error
        address = self._server.sockets[0].getsockname()
        self.store.address = f"{address[0]}:{address[1]}"
        self._expiring = asyncio.create_task(self._expire())
        return str(address[0]), int(address[1])

    @property
    def in_flight(self) -> int:
        """Invocations and fetches of all callers."""
        return sum(len(connection.tasks) for connection in self.connections)

    def count_queues(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many invocations wait and how many run, by component."""
        waiting = {name: worker.waiting for name, worker in self.workers.items()}
        return waiting, {name: worker.running for name, worker in self.workers.items()}

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse what is new, wait for what is under way, then hang up on everyone."""
        self.draining = True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + drain_s
        while self.in_flight and loop.time() < until_s:
            await asyncio.sleep(_DRAIN_CHECK_S)
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            await connection.close()
        if self._expiring is not None:
            self._expiring.cancel()
        await self._resolver.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.store.expire()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Those who have not yet said who they are count as well.
        if len(self.connections) + self._strangers >= self._limits.connections:
            writer.transport.abort()
            return
        decoder = FrameDecoder(MAX_HELLO_BYTES)
        self._strangers += 1
        try:
            connection, rest = await self._meet(reader, writer, decoder)
        except (WireError, OSError, TimeoutError) as error:
            _LOG.info("a stranger was turned away: %s", str(error) or "no hello in time")
            writer.transport.abort()
            return
        finally:
            self._strangers -= 1
        self.connections.add(connection)
        try:
            for body in rest:
                self._handle(connection, body)
            await self._listen(connection, reader, decoder)
        except (WireError, OSError, TimeoutError, CallerGoneError) as error:
            _LOG.warning("%s is cut off: %s", connection.holder, str(error) or "half a frame")
        finally:
            self.connections.discard(connection)
            await connection.close()

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: FrameDecoder
    ) -> tuple[CallerConnection, list[bytes]]:
        """Let in who knows the token, and return what else came with the hello."""
        bodies: list[bytes] = []
        async with asyncio.timeout(self._limits.hello_s):
            while not bodies:
                data = await reader.read(MAX_HELLO_BYTES)
                if not data:
                    raise WireError("it hung up without a hello")
                bodies = list(decoder.feed(data))
        hello = decode_hello(bodies[0])
        # In constant time: how long it takes tells nothing about the token.
        if not hmac.compare_digest(hello.token.encode(), self._token):
            raise WireError("its token is wrong")
        if hello.version != VERSION:
            raise WireError(f"it speaks version {hello.version}, not {VERSION}")
        if not 0 < len(hello.holder) <= _MAX_HOLDER or hello.holder == CACHE:
            raise WireError("its holder is no name")
        # Only who is known may send large frames.
        decoder.max_bytes = MAX_FRAME_BYTES
        connection = CallerConnection(writer, hello.holder, self._limits.silent_s)
        nixl = self._wire.metadata if self._wire is not None else b""
        names = sorted(self.workers)
        connection.write(ExecutorWelcome(VERSION, self.name, identify_host(), names, nixl))
        return connection, bodies[1:]

    async def _listen(
        self, connection: CallerConnection, reader: asyncio.StreamReader, decoder: FrameDecoder
    ) -> None:
        while True:
            # Between two frames a caller may be silent for long; a frame that has begun must come to its end.
            if decoder.is_between:
                data = await reader.read(_READ_BYTES)
            else:
                async with asyncio.timeout(self._limits.frame_s):
                    data = await reader.read(_READ_BYTES)
            if not data:
                return
            for body in decoder.feed(data):
                self._handle(connection, body)
            # Who does not read what it is told is not read from.
            await connection.flush()

    def _handle(self, connection: CallerConnection, body: bytes) -> None:
        message, memory = decode_call(body)
        match message:
            case Invoke():
                self._begin_invocation(connection, message, memory)
            case Cancel():
                connection.cancel(message.id)
            case Fetch():
                if self._has_room(connection, message.id):
                    connection.begin(message.id, self._send_array(connection, message))
            case Renew():
                lease_s = min(max(message.lease_s, 0.0), _MAX_S)
                self.store.renew(message.handles, connection.holder, lease_s)
            case ReleaseArrays():
                self.store.release(message.handles, connection.holder)
            case AskQueues():
                connection.write(Queues(message.id, *self.count_queues()))

    def _has_room(self, connection: CallerConnection, number: int) -> bool:
        if number in connection.tasks:
            raise WireError(f"the number {number} is used twice")
        if len(connection.tasks) < self._limits.in_flight:
            return True
        most = self._limits.in_flight
        connection.fail(number, InvocationError("overloaded", f"{most} are under way already"))
        return False

    def _begin_invocation(self, connection: CallerConnection, message: Invoke, memory: int) -> None:
        if not self._has_room(connection, message.id):
            return
        worker = self.workers.get(message.component)
        error: InvocationError | None = None
        if self.draining:
            error = InvocationError("draining", f"{self.name} is being stopped")
        elif worker is None:
            name = shorten(message.component)
            error = InvocationError("bad_input", f"{self.name} does not run {name!r}", "component")
        elif not (message.deadline_s >= 0.0 and message.lease_s >= 0.0):
            error = InvocationError("bad_input", "times are not negative", "deadline_s")
        elif self._input_bytes + memory > self._limits.input_bytes:
            error = InvocationError("overloaded", "the inputs that wait fill the memory")
        if error is not None or worker is None:
            assert error is not None
            connection.fail(message.id, error)
            return
        self._input_bytes += memory
        work = self._invoke(connection, message, worker)
        task = connection.begin(message.id, work)
        # Given back however the invocation ends.
        task.add_done_callback(lambda _: self._forget(memory))

    def _forget(self, memory: int) -> None:
        self._input_bytes -= memory

    async def _invoke(
        self, connection: CallerConnection, message: Invoke, worker: ComponentWorker
    ) -> None:
        saver = OutputSaver(self.store, connection.holder, min(message.lease_s, _MAX_S))

        async def emit(value: Value) -> None:
            await connection.send(StreamPiece(message.id, pack_value(value)))
            saver.delivered()

        deadline = asyncio.timeout(min(message.deadline_s, _MAX_S))
        try:
            async with deadline:
                inputs = await self._resolver.resolve(message.inputs)
                answer = await worker.run(inputs, saver, emit)
                # Who hears that it is finished may free the inputs: let go of them before.
                del inputs
                value = pack_value(answer.value)
                await connection.send(
                    Finished(message.id, value, answer.waited_s, answer.ran_s, answer.batch)
                )
                saver.delivered()
        except CallerGoneError:
            pass
        except LostHandleError as error:
            lost = InvocationError("lost_handle", error.message, handle=error.handle)
            connection.fail(message.id, lost)
        except BadInputError as error:
            connection.fail(message.id, InvocationError("bad_input", error.message, error.param))
        except Exception as error:  # noqa: BLE001 - whatever happens here, the others go on
            words = f"{worker.name} took longer than {message.deadline_s:g} s"
            late = InvocationError("deadline", words) if deadline.expired() else None
            connection.fail(message.id, late or note_failure(worker.name, error))
        finally:
            saver.abandon()

    async def _send_array(self, connection: CallerConnection, message: Fetch) -> None:
        try:
            data = flat_bytes(self.store.open(message.handle))
        except LostHandleError as error:
            lost = InvocationError("lost_handle", error.message, handle=error.handle)
            connection.fail(message.id, lost)
            return
        if message.nixl and await self._lend_array(connection, message.id, data):
            return
        with contextlib.suppress(CallerGoneError):
            for start in range(0, len(data), _CHUNK_BYTES):
                end = start + _CHUNK_BYTES
                # MessagePack takes the view as it is: nothing is copied but into the frame.
                piece = data[start:end]
                chunk = ArrayChunk(message.id, start, piece, end >= len(data))  # type: ignore[arg-type]
                await connection.send(chunk)

    async def _lend_array(
        self, connection: CallerConnection, number: int, data: memoryview
    ) -> bool:
        """Lend an array until the caller has read it; returns False where there is no room."""
        lent = None if self._wire is None else await self._wire.lend(data)
        if self._wire is None or lent is None:
            return False
        try:
            connection.write(ArrayLent(number, lent.address, lent.crc32))
            # Whoever has read it cancels this.
            await asyncio.sleep(self._limits.silent_s)
            connection.fail(number, InvocationError("deadline", "it was lent, and not read"))
        finally:
            self._wire.take_back(lent)
        return True
