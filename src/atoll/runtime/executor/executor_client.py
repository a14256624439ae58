"""Client of an executor: many invocations at once over one connection.

client = ExecutorClient("127.0.0.1:7000", token, holder="graph-server-0")
await client.connect()
finished = await client.call("hibari", {"text": "Good morning."}, lease_s=60.0)
samples = await client.fetch(finished.value["samples"])
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from atoll.core.errors import AtollError, InputError
from atoll.runtime.executor.executor_messages import (
    VERSION,
    ArrayChunk,
    ArrayLent,
    AskQueues,
    CallerHello,
    Cancel,
    ExecutorWelcome,
    Fetch,
    Finished,
    FromExecutor,
    InvocationFailed,
    Invoke,
    Queues,
    ReleaseArrays,
    Renew,
    StreamPiece,
)
from atoll.runtime.executor.executor_wire import (
    FrameDecoder,
    WireError,
    decode_answer,
    decode_welcome,
    encode_frame,
    pack_value,
)
from atoll.tasks.values import Handle, Value, handles_in

if TYPE_CHECKING:
    from atoll.runtime.executor.arrays import Array
    from atoll.runtime.executor.nixl_wire import NixlWire

Dial: TypeAlias = (
    "Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]"
)
"""Opens a connection to a host and port, as `asyncio.open_connection`; OSError where it cannot."""
_Answer: TypeAlias = "FromExecutor | AtollError"
_Answers: TypeAlias = "asyncio.Queue[_Answer]"
_LOG = logging.getLogger(__name__)
_READ_BYTES = 2**18
_GRACE_S = 5.0
"""How much longer than its deadline an executor may take to say that it has passed."""


_LITTLE_BYTES = 2**14
"""A transport that holds no more than this has asked nobody to pause."""


def is_flowing(writer: asyncio.StreamWriter) -> bool:
    """Return whether `drain` would return at once, without asking it, which takes several times as long."""
    transport = writer.transport
    return not transport.is_closing() and transport.get_write_buffer_size() <= _LITTLE_BYTES


class ExecutorLostError(AtollError):
    """The executor cannot be reached, or has gone; what was under way may be tried elsewhere."""


class InvocationError(AtollError):
    """The executor answered, and could not do it; `code` and the rest are as in `InvocationFailed`."""

    def __init__(
        self, code: str, message: str, param: str | None = None, handle: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.handle = handle


class ExecutorClient:
    """A connection to one executor; made anew with `connect` after it broke.

    holder: who keeps what comes back, in leases; the same name after a reconnect keeps its leases.
    wire: arrays are read by NIXL from executors that have it, too.
    """

    def __init__(
        self,
        address: str,
        token: str,
        holder: str,
        *,
        connect_s: float = 5.0,
        dial: Dial = asyncio.open_connection,
        wire: NixlWire | None = None,
    ) -> None:
        self.address = address
        self.holder = holder
        self.name = ""
        self.host = ""
        self.components: tuple[str, ...] = ()
        self._token = token
        self._connect_s = connect_s
        self._dial = dial
        self._wire = wire
        self._nixl = b""
        self._connecting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Answers | _LastAnswer] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether invocations can be sent."""
        return self._reading is not None and not self._reading.done()

    async def connect(self) -> None:
        """Connect where it is not, and say who calls; `ExecutorLostError` if nobody answers or lets us in."""
        async with self._connecting:
            if not self.is_connected:
                await self._hang_up()
                await self._connect()

    async def _connect(self) -> None:
        host, sign, port = self.address.rpartition(":")
        if not sign or not port.isdecimal():
            raise InputError(f"{self.address[:60]!r} is not host:port", field="address")
        decoder = FrameDecoder()
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await self._dial(host, int(port))
                self._writer = writer
                writer.write(encode_frame(CallerHello(VERSION, self._token, self.holder)))
                bodies: list[bytes] = []
                while not bodies:
                    data = await reader.read(_READ_BYTES)
                    if not data:
                        raise ExecutorLostError(f"{self.address} closed the connection")
                    bodies = list(decoder.feed(data))
                self._greet(decode_welcome(bodies[0]))
        except (OSError, TimeoutError, WireError) as error:
            await self._hang_up()
            reason = str(error) or "no answer in time"
            raise ExecutorLostError(f"{self.address} is not there: {reason}") from error
        except BaseException:
            await self._hang_up()
            raise
        self._reading = asyncio.create_task(self._read(reader, decoder))

    def _greet(self, welcome: ExecutorWelcome) -> None:
        if welcome.version != VERSION:
            raise WireError(f"{self.address} speaks version {welcome.version}, not {VERSION}")
        self.name, self.host = welcome.name, welcome.host
        self.components = tuple(welcome.components)
        if self._wire is not None and welcome.nixl != self._nixl:
            # Another process is there.
            self._wire.forget(self._nixl)
        self._nixl = welcome.nixl

    async def call(
        self,
        component: str,
        inputs: Mapping[str, Value],
        *,
        lease_s: float = 60.0,
        deadline_s: float = 600.0,
        request: str = "",
    ) -> Finished:
        """Run a component and return its whole result; pieces that come before are given back.

        Arrays in the result are handles, leased to the holder for `lease_s` seconds. Cancelled, it tells the
        executor. `InvocationError` if it could not be done, `ExecutorLostError` if the executor is gone.
        """
        packed = {name: pack_value(value) for name, value in inputs.items()}
        last = _LastAnswer(self._give_back)
        number = self._begin(last)
        # Only for an executor that does not say itself that the deadline has passed.
        patience = last.future.get_loop().call_later(deadline_s + _GRACE_S, last.give_up)
        over = False
        try:
            await self._send(Invoke(number, component, packed, lease_s, deadline_s, request))
            answer = await last.future
            over = True
            _check(answer)
            if not isinstance(answer, Finished):
                raise ExecutorLostError(f"{self.address} ended without a result")
            return answer
        except TimeoutError:
            raise InvocationError("deadline", f"{component} took too long") from None
        finally:
            patience.cancel()
            del self._waiting[number]
            # Left early, or cancelled: what has come is given back, and the executor need not go on.
            if not over:
                last.discard()
                self._tell(Cancel(number))

    async def stream(
        self,
        component: str,
        inputs: Mapping[str, Value],
        *,
        lease_s: float = 60.0,
        deadline_s: float = 600.0,
        request: str = "",
    ) -> AsyncGenerator[StreamPiece | Finished, None]:
        """Run a component and yield its pieces as they come, then what it ended with.

        Left early, it tells the executor to stop. Errors as of `call`.
        """
        packed = {name: pack_value(value) for name, value in inputs.items()}
        until_s = asyncio.get_running_loop().time() + deadline_s + _GRACE_S
        with self._open() as (number, answers):
            over = False
            try:
                await self._send(Invoke(number, component, packed, lease_s, deadline_s, request))
                while not over:
                    async with asyncio.timeout_at(until_s):
                        answer = await _next(answers)
                    over = isinstance(answer, Finished)
                    if isinstance(answer, (StreamPiece, Finished)):
                        yield answer
            except TimeoutError:
                raise InvocationError("deadline", f"{component} took too long") from None
            except (InvocationError, ExecutorLostError):
                over = True
                raise
            finally:
                if not over:
                    self._tell(Cancel(number))

    async def fetch(self, handle: Handle, *, verify: bool = False) -> Array:
        """Return the array of a handle: carried by it, mapped from this host, read by NIXL, or sent.

        The array must not be written to. `InvocationError` with the code "lost_handle" if it is gone.
        """
        from atoll.runtime.executor.arrays import LostHandleError, open_handle
        from atoll.runtime.executor.nixl_wire import NixlError

        # From this host if it can be: nothing is sent over the wire then.
        with contextlib.suppress(LostHandleError):
            return open_handle(handle, verify=verify)
        wire = self._wire
        try:
            if wire is not None and (wire.only or self._may_read(wire, handle.nbytes)):
                try:
                    return await self._fetch(handle, wire)
                except NixlError as error:
                    if wire.only:
                        raise InvocationError("failed", error.message, handle=handle.id) from error
                    _LOG.warning("%s: %s; now over the connection", self.address, error.message)
            return await self._fetch(handle, None)
        except LostHandleError as error:
            raise InvocationError("lost_handle", error.message, handle=handle.id) from error

    def _may_read(self, wire: NixlWire, nbytes: int) -> bool:
        """Return whether NIXL may lead to the executor: not where only the tunnel does."""
        writer = self._writer
        direct = writer is not None and isinstance(writer.get_extra_info("peername"), tuple)
        return direct and wire.may_read(self._nixl, nbytes)

    async def _fetch(self, handle: Handle, wire: NixlWire | None) -> Array:
        from atoll.runtime.executor.arrays import ArrayParts, read_bytes
        from atoll.runtime.executor.nixl_wire import NixlError

        parts = ArrayParts(handle)
        with self._open() as (number, answers):
            await self._send(Fetch(number, handle.id, nixl=wire is not None))
            while True:
                answer = await _next(answers)
                if isinstance(answer, ArrayLent) and wire is not None:
                    try:
                        data = await wire.read(
                            self._nixl, answer.address, handle.nbytes, answer.crc32
                        )
                    finally:
                        # Read or not, it need not be lent any more.
                        self._tell(Cancel(number))
                    return read_bytes(handle, data, verify=True)
                if isinstance(answer, ArrayChunk):
                    if wire is not None and wire.only:
                        self._tell(Cancel(number))
                        raise NixlError("the executor does not lend it by NIXL")
                    # It may be sent where it was asked to be lent: there was no room.
                    parts.add(answer.at, answer.data)
                    if answer.last:
                        return parts.finish()

    async def ask_queues(self) -> dict[str, int]:
        """Return how many invocations wait or run, by component."""
        with self._open() as (number, answers):
            await self._send(AskQueues(number))
            while not isinstance(answer := await _next(answers), Queues):
                pass
        names = {*answer.waiting, *answer.running}
        return {
            name: answer.waiting.get(name, 0) + answer.running.get(name, 0)
            for name in sorted(names)
        }

    async def renew(self, handles: Sequence[Handle], lease_s: float) -> None:
        """Keep arrays for `lease_s` seconds from now."""
        # Inline arrays travel in their handles; nobody keeps them.
        if ids := [handle.id for handle in handles if not handle.is_inline]:
            await self._send(Renew(ids, lease_s))

    async def release(self, handles: Sequence[Handle]) -> None:
        """Give arrays up; they are freed when no other holder needs them."""
        if ids := [handle.id for handle in handles if not handle.is_inline]:
            await self._send(ReleaseArrays(ids))

    async def close(self) -> None:
        """Hang up; what is under way fails with `ExecutorLostError`."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        await self._hang_up()

    async def _hang_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @contextlib.contextmanager
    def _open(self) -> Generator[tuple[int, _Answers], None, None]:
        """Yield the number of a new exchange and the queue its answers come in."""
        answers: _Answers = asyncio.Queue()
        number = self._begin(answers)
        try:
            yield number, answers
        finally:
            # No more answers come from here on; those that did and were not taken hold leases.
            del self._waiting[number]
            while not answers.empty():
                self._give_back(answers.get_nowait())

    def _begin(self, answers: _Answers | _LastAnswer) -> int:
        """Return the number of a new exchange, whose answers are put there."""
        if not self.is_connected:
            raise ExecutorLostError(f"there is no connection to {self.address}")
        number = next(self._ids)
        self._waiting[number] = answers
        return number

    async def _send(self, message: Struct) -> None:
        self._tell(message)
        if self._writer is not None and not is_flowing(self._writer):
            try:
                await self._writer.drain()
            except OSError as error:
                raise ExecutorLostError(f"{self.address} is gone: {error}") from error

    def _tell(self, message: Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    def _give_back(self, answer: _Answer) -> None:
        """Release the arrays of an answer that nobody takes."""
        if isinstance(answer, (StreamPiece, Finished)):
            ids = [handle.id for handle in handles_in(answer.value) if not handle.is_inline]
            if ids:
                self._tell(ReleaseArrays(ids))

    async def _read(self, reader: asyncio.StreamReader, decoder: FrameDecoder) -> None:
        reason = "it closed the connection"
        try:
            while data := await reader.read(_READ_BYTES):
                for body in decoder.feed(data):
                    message = decode_answer(body)
                    if (answers := self._waiting.get(message.id)) is not None:
                        answers.put_nowait(message)
                    else:
                        # Sent before the executor heard that nobody waits any more.
                        self._give_back(message)
        except (OSError, WireError) as error:
            reason = str(error)
        finally:
            # However it ended, nobody may go on waiting.
            if self._writer is not None:
                self._writer.close()
            lost = ExecutorLostError(f"{self.address} is gone: {reason}")
            for answers in self._waiting.values():
                answers.put_nowait(lost)


async def _next(answers: _Answers) -> FromExecutor:
    return _check(await answers.get())


def _check(answer: _Answer) -> FromExecutor:
    if isinstance(answer, AtollError):
        # A new one for each who waits: an error collects the traceback of whoever raises it.
        raise type(answer)(answer.message)
    if isinstance(answer, InvocationFailed):
        raise InvocationError(answer.code, answer.message, answer.param, answer.handle)
    return answer


class _LastAnswer:
    """Waits for the end of an invocation; what nobody will take is given back."""

    __slots__ = ("_give_back", "future")

    def __init__(self, give_back: Callable[[_Answer], None]) -> None:
        self.future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._give_back = give_back

    def put_nowait(self, answer: _Answer) -> None:
        if isinstance(answer, StreamPiece) or self.future.done():
            self._give_back(answer)
        else:
            self.future.set_result(answer)

    def give_up(self) -> None:
        if not self.future.done():
            self.future.set_exception(TimeoutError())

    def discard(self) -> None:
        """Give back the end, if it came and whoever waited was cancelled before it could look."""
        future = self.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self._give_back(future.result())
