"""How machines that joined are found and asked: a fabric's observer on a loop of its own.

Targets are asked from plain threads; a fabric lives in one event loop. A process has one observer for each
token, however often a fleet's targets are opened.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from atoll.core.errors import AtollError
from atoll.core.extras import require_extras
from atoll.deploy.joined.machine_request import (
    PURPOSE,
    JoinedMachine,
    MachineAnswer,
    MachineRequest,
    pool_machines,
)
from atoll.deploy.target import DeployError
from atoll.runtime.join.announcement import INSTANCES, TAKES_LABEL

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric

T = TypeVar("T")
_CONNECT_S = 20.0
_HUB_S = 6.0
"""How long a hub may take to let the observer in; who asks on a page waits for it."""
_TOKENS_S = 0.5
"""How long after joining it takes to see who is there."""
_ANSWER_S = {
    "look": 15.0,
    "logs": 15.0,
    "drain": 30.0,
    "measure": 15.0,
    "start": 120.0,
    "stop": 120.0,
}
"""How long a machine may take: it waits for processes to begin or end."""


class MachineFabric:
    """See the module. All machines are in one `region`."""

    _open: ClassVar[dict[tuple[str, str], MachineFabric]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, token: Path, region: str) -> None:
        self._token, self._region = token, region
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fabric: Fabric | None = None
        self._issued = 0

    @classmethod
    def of(cls, token: Path, region: str) -> MachineFabric:
        """Return the observer of a token, which may not be there yet: nobody has joined then."""
        with cls._opening:
            return cls._open.setdefault((str(token), region), cls(token, region))

    def list(self) -> tuple[JoinedMachine, ...]:
        """Return the machines that are there now and run instances, in the order of their names."""
        if not self._token.exists():
            return ()
        return self._do(self._list(), _CONNECT_S)

    def ask(
        self, requests: Mapping[str, MachineRequest]
    ) -> Mapping[str, MachineAnswer | DeployError]:
        """Ask each session its own, all at once."""
        most_s = max(_ANSWER_S.get(each.verb, 15.0) for each in requests.values())
        return self._do(self._ask_all(requests), most_s + _CONNECT_S)

    def close(self) -> None:
        """Leave the fabric; the next question joins anew."""
        with self._lock:
            loop, thread, fabric = self._loop, self._thread, self._fabric
            self._loop = self._thread = self._fabric = None
        if loop is None or thread is None:
            return
        if fabric is not None:
            asyncio.run_coroutine_threadsafe(fabric.close(), loop).result(_CONNECT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    # On its loop

    def _do(self, work: Coroutine[Any, Any, T], max_s: float) -> T:
        with self._lock:
            if self._loop is None:
                require_extras("fabric")
                self._loop = asyncio.new_event_loop()
                name = f"machines of {self._token}"
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=name, daemon=True
                )
                self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(max_s)
        except TimeoutError as error:
            raise DeployError("the fabric does not answer", kind="unreachable") from error
        except DeployError:
            raise
        except AtollError as error:
            raise DeployError(error.message, kind="unreachable", hint=error.hint) from error

    async def _joined(self) -> Fabric:
        from atoll.fabric.identity.access import Access
        from atoll.fabric.registry.records import Metadata
        from atoll.fabric.transport.fabric import Fabric

        issued = self._token.stat().st_mtime_ns
        if self._fabric is not None and issued != self._issued:
            # The fleet's fabric was made anew.
            before, self._fabric = self._fabric, None
            await before.close()
        if self._fabric is None:
            access, self._issued = Access.open(f"@{self._token}"), issued
            if access.identity.role != "operator":
                raise DeployError(
                    f"{self._token} is a {access.identity.role}'s token, and only an operator tells machines "
                    "what to run",
                    kind="settings",
                    hint="atoll fabric issue NAME --role operator, and set joined: {fabric: FILE}",
                )
            metadata = Metadata(
                name="controller", provider=access.identity.provider, role="operator"
            )
            try:
                async with asyncio.timeout(_HUB_S):
                    self._fabric = await Fabric.connect(
                        access, metadata, observe=True, hear_loads=False
                    )
            except TimeoutError:
                raise DeployError("no hub of the fabric answers", kind="unreachable") from None
            await asyncio.sleep(_TOKENS_S)
        if not self._fabric.connected:
            raise DeployError("no hub of the fabric answers", kind="unreachable")
        return self._fabric

    async def _list(self) -> tuple[JoinedMachine, ...]:
        fabric = await self._joined()
        # Of two of one name, one has just been started anew.
        peers = {
            peer.name: peer
            for peer in sorted(fabric.peers(), key=lambda each: each.since_s)
            if peer.alive and peer.metadata.labels.get(TAKES_LABEL) == INSTANCES
        }
        return tuple(
            JoinedMachine(
                sid=peer.sid,
                name=peer.name,
                pool=pool_machines(
                    peer.name,
                    peer.metadata.hardware.gpus,
                    self._region,
                    peer.metadata.price_usd_per_hour or 0.0,
                ),
            )
            for _, peer in sorted(peers.items())
        )

    async def _ask_all(
        self, requests: Mapping[str, MachineRequest]
    ) -> Mapping[str, MachineAnswer | DeployError]:
        fabric = await self._joined()
        answers = await asyncio.gather(*(self._ask(fabric, *each) for each in requests.items()))
        return dict(zip(requests, answers, strict=True))

    async def _ask(
        self, fabric: Fabric, sid: str, request: MachineRequest
    ) -> MachineAnswer | DeployError:
        from atoll.fabric.identity import fabric_keys
        from atoll.runtime.join.signed_orders import read_reply, sign_order

        peer = fabric.peer(sid)
        name = sid if peer is None else peer.name
        order = sign_order(
            *(PURPOSE, request.to_json().encode(), fabric.identity),
            *(fabric.access.fabric_id, sid, time.time()),
        )
        try:
            data = await fabric.query(fabric_keys.host(sid), order, _ANSWER_S[request.verb])
        except TimeoutError:
            return DeployError(f"{name} does not answer", kind="unreachable")
        reply = read_reply(data)
        if not reply.accepted:
            return DeployError(f"{name} refused: {reply.message}", kind="settings")
        try:
            answer = MachineAnswer.from_json(reply.body)
        except AtollError as error:
            return DeployError(f"{name} answers in other words: {error.message}", kind="settings")
        if answer.refusal is not None:
            refused = f"{name}: {answer.refusal}"
            return DeployError(refused, kind=answer.kind or "settings", hint=answer.hint)
        return answer
