"""Messages between an executor and those who invoke it.

A connection carries frames (`wire`), each one message in MessagePack, many invocations at once:

    client    CallerHello, then any of Invoke, Cancel, Fetch, Renew, ReleaseArrays, AskQueues
    executor  ExecutorWelcome, then StreamPiece*, Finished or InvocationFailed for Invoke,
              ArrayChunk* or ArrayLent for Fetch, Queues for AskQueues

Handles in values are MessagePack extensions. Frames are bounded; arrays travel in chunks.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

VERSION = 2
MAX_FRAME_BYTES = 8 * 2**20
"""The longest frame; longer ones end the connection."""
MAX_HELLO_BYTES = 4096
"""The longest first frame of a caller, of whom nothing is known yet."""
CHUNK_BYTES = 2**20
"""Arrays are sent in chunks of this size."""


class CallerHello(Struct, tag="hello"):
    """Who calls. `holder` names the caller in leases: what it holds is freed when its leases run out."""

    version: int
    token: str
    holder: str


class ExecutorWelcome(Struct, tag="welcome"):
    """Who answers, and what it runs."""

    version: int
    name: str
    host: str
    """The identity of its host, as in handles."""
    components: list[str]
    nixl: bytes = b""
    """What NIXL needs to read arrays from its memory; without it, it cannot be."""


class Invoke(Struct, tag="invoke"):
    """Run a component. Arrays of the result are leased to the caller for `lease_s` seconds."""

    id: int
    component: str
    inputs: dict[str, Any]
    """Values (`atoll.tasks.values.Value`) by name."""
    lease_s: float = 60.0
    deadline_s: float = 600.0
    request: str = ""
    """The request it is for, in logs and traces."""


class Cancel(Struct, tag="cancel"):
    """Nobody wants the result of an invocation any more."""

    id: int


class StreamPiece(Struct, tag="piece"):
    """The next piece of a stream."""

    id: int
    value: Any


class Finished(Struct, tag="finished"):
    """The end of an invocation: its result, and where its time went, in seconds."""

    id: int
    value: Any
    waited_s: float = 0.0
    ran_s: float = 0.0
    batch: int = 1


class InvocationFailed(Struct, tag="failed"):
    """The end of an invocation or a fetch that failed.

    code: "bad_input" (the client's fault, `param` says where), "lost_handle" (`handle` is gone, and with it
    what it named), "overloaded" or "draining" (try elsewhere), "deadline" (it took longer than its caller
    would wait), "failed" (the component broke).
    """

    id: int
    code: str
    message: str
    param: str | None = None
    handle: str | None = None


class Fetch(Struct, tag="fetch"):
    """Send me the bytes of an array, or lend them where I can read them by NIXL."""

    id: int
    handle: str
    nixl: bool = False


class ArrayChunk(Struct, tag="chunk"):
    """Bytes of an array, which begin at byte `at` of it; `last` says that they are all."""

    id: int
    at: int
    data: bytes
    last: bool


class ArrayLent(Struct, tag="lent"):
    """An array that can be read by NIXL at `address`, until a `Cancel` says that it was."""

    id: int
    address: int
    crc32: int


class Renew(Struct, tag="renew"):
    """I still need these arrays, for so many seconds more."""

    handles: list[str]
    lease_s: float


class ReleaseArrays(Struct, tag="release"):
    """I need these arrays no more."""

    handles: list[str]


class AskQueues(Struct, tag="ask_queues"):
    """How long are your queues?"""

    id: int


class Queues(Struct, tag="queues"):
    """Invocations that wait and that run, by component."""

    id: int
    waiting: dict[str, int]
    running: dict[str, int]


ToExecutor = Invoke | Cancel | Fetch | Renew | ReleaseArrays | AskQueues
"""Messages after a `CallerHello`."""
FromExecutor = StreamPiece | Finished | InvocationFailed | ArrayChunk | ArrayLent | Queues
"""Messages after a `ExecutorWelcome`."""
