"""Mailboxes in memory, in place of those over ZeroMQ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from atoll.engine.engine_messages import Message
from atoll.engine.frames import decode, encode


class MemoryHub:
    """Mailboxes inside one process. Messages still become bytes on the way, as over a wire.

    `lost` may drop messages by (from, to), which is how tests cut a link or kill a node.
    """

    def __init__(self, lost: Callable[[str, str], bool] | None = None) -> None:
        self.queues: dict[tuple[str, str], deque[list[Any]]] = defaultdict(deque)
        self.lost = lost or (lambda _from, _to: False)

    def mailbox(self, endpoint: str) -> MemoryMailbox:
        """Open the inbox called `endpoint`."""
        return MemoryMailbox(self, endpoint)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the (from, to) pairs that have messages under way, sorted."""
        return sorted(pair for pair, queue in self.queues.items() if queue)


class MemoryMailbox:
    """One inbox of a hub."""

    def __init__(self, hub: MemoryHub, endpoint: str) -> None:
        self.hub = hub
        self.endpoint = endpoint

    def send(self, to: str, message: Message) -> None:
        """Put the message into the other's queue."""
        if not self.hub.lost(self.endpoint, to):
            self.hub.queues[self.endpoint, to].append([bytes(part) for part in encode(message)])

    def receive(self, timeout_s: float = 0.0, *, sender: str | None = None) -> list[Message]:
        """Take what has come, from one sender if named; never waits."""
        del timeout_s
        messages = []
        for (source, to), queue in list(self.hub.queues.items()):
            if to == self.endpoint and sender in (None, source):
                while queue:
                    messages.append(decode(queue.popleft()))
        return messages
