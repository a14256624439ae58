"""Where a node takes orders: a key of its own session, which operators ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from atoll.core.errors import AtollError
from atoll.fabric.identity import keys
from atoll.fabric.identity.identity import RefusedError
from atoll.fabric.transport.fabric import Fabric
from atoll.runtime.join.assignment import Assignment, OrderReply, OrderVerifier, check, encode
from atoll.telemetry.logs import Log

OnOrder = Callable[[Assignment, str], None]
"""Called with an order that is to be obeyed and the operator's name; RefusedError if it cannot be now."""


class _Query(Protocol):
    @property
    def payload(self) -> bytes: ...

    def reply(self, payload: bytes) -> None: ...


class OrderReceiver:
    """Takes orders for as long as it is open, also when the session is renewed."""

    def __init__(
        self, fabric: Fabric, on_order: OnOrder, log: Log, *, models: str | None = None
    ) -> None:
        self._fabric = fabric
        self._on_order = on_order
        self._log = log
        self._models = models
        self._orders = OrderVerifier(fabric.verifier)
        self._key = fabric.queryable(keys.assign(fabric.sid), self._asked)
        fabric.on_renewed.append(self._renewed)

    def close(self) -> None:
        """Stop answering operators; orders that come later go unanswered."""
        self._fabric.on_renewed.remove(self._renewed)
        self._key.close()

    def _renewed(self, old: str, new: str) -> None:
        del old
        self._key.close()
        self._key = self._fabric.queryable(keys.assign(new), self._asked)

    def _asked(self, query: _Query) -> None:
        try:
            assignment, person = self._orders.read(query.payload, self._fabric.sid, time.time())
            check(assignment, models=self._models)
            self._on_order(assignment, person.name)
        except AtollError as error:
            reason = error.reason if isinstance(error, RefusedError) else "check"
            self._log.event("assign.refused", reason=reason, message=str(error))
            query.reply(encode(OrderReply(False, str(error)[:1000])))
            return
        self._log.event("assign.accepted", by=person.name, model=assignment.model)
        query.reply(encode(OrderReply(True, "accepted")))
