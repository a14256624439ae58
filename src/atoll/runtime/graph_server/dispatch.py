"""Sends the invocations of one request to executors, and sees them through.

An invocation that fails is tried elsewhere (`recovery`); a stream that breaks off goes on where it was
(`progress`); an input that is lost is made again, and nothing else (`leases`). Whatever executors granted is
released when the request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from atoll.runtime.graph_server.executor_links import ExecutorFleet, ExecutorOrder, ExecutorOutcome
from atoll.runtime.graph_server.path_router import PathRouter, RequestRoute
from atoll.runtime.graph_server.recovery import (
    GiveUp,
    Pause,
    Recovery,
    Remake,
    StreamProgress,
    TroubleError,
)
from atoll.runtime.graph_server.request_leases import HandleLedger, array_bytes
from atoll.runtime.graph_server.request_traces import InvocationTrace, RequestTrace
from atoll.runtime.openai import ApiError
from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.values import Handle, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEASE_S = 60.0
"""For how long results are leased; they are renewed three times as often."""
Observer = Callable[[str, str, str, float], None]
"""Told of every attempt: component, executor, "ok" or what went wrong, seconds that it took."""
_Key = tuple[int, int | None]


def ignore(component: str, executor: str, outcome: str, seconds: float) -> None:
    """Observe nothing."""
    del component, executor, outcome, seconds


class RequestDispatcher:
    """Invokes for one request (`atoll.tasks.invocation.Invoker`)."""

    def __init__(
        self,
        fleet: ExecutorFleet,
        router: PathRouter,
        route: RequestRoute,
        trace: RequestTrace,
        *,
        patience_s: float = 30.0,
        deadline_s: float = 600.0,
        dynamic: bool = False,
        observe: Observer = ignore,
    ) -> None:
        self.route = route
        self.trace = trace
        self.ledger = HandleLedger()
        self._fleet = fleet
        self._router = router
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._dynamic = dynamic
        self._observe = observe
        self._made: dict[_Key, tuple[Invocation, Value]] = {}
        self._locks: dict[_Key, asyncio.Lock] = {}
        self._kept: dict[int, str] = {}
        self._pieces: dict[str, Counter[str]] = {}
        """By component, how many pieces of cut streams every executor is at work on."""

    async def call(self, invocation: Invocation) -> Value:
        """Run an invocation and return what it gives."""
        entry = self._enter(invocation)
        recovery = self._recovery(invocation)
        while True:
            executor = await self._choose(recovery, invocation)
            order = self._order(invocation, invocation.inputs)
            began_s = self.trace.now_s()
            try:
                with self._at_work(invocation, executor):
                    outcome = await self._fleet.call(executor, order)
            except TroubleError as trouble:
                await self._mend(recovery, executor, trouble, entry, began_s)
                continue
            self._finish(invocation, entry, recovery, executor, outcome, began_s)
            self._made[_key(invocation)] = (invocation, outcome.value)
            return outcome.value

    async def stream(self, invocation: Invocation) -> AsyncGenerator[Value | Final, None]:
        """Run an invocation and yield its pieces as they come, then its end."""
        entry = self._enter(invocation)
        recovery = self._recovery(invocation)
        progress = StreamProgress(invocation.inputs)
        pieces: list[Value] = []
        while True:
            executor = await self._choose(recovery, invocation)
            order = self._order(invocation, progress.begin())
            began_s = self.trace.now_s()
            try:
                async with contextlib.aclosing(self._fleet.stream(executor, order)) as items:
                    async for item in items:
                        if isinstance(item, ExecutorOutcome):
                            self._finish(invocation, entry, recovery, executor, item, began_s)
                            whole: Value = [*pieces, item.value]
                            self._made[_key(invocation)] = (invocation, whole)
                            yield Final(item.value)
                            return
                        self.ledger.grant(executor, item, _key(invocation))
                        recovery.progressed()
                        # A stream that had to begin anew repeats what the client has; that is not given
                        # twice.
                        if progress.is_news(item):
                            if array_bytes(item):
                                # Only what may have to be made again is kept.
                                pieces.append(item)
                            yield item
                raise TroubleError("lost", "the stream ended without its end")
            except TroubleError as trouble:
                await self._mend(recovery, executor, trouble, entry, began_s)

    async def array(self, handle: Handle) -> NDArray[Any]:
        """Return the array of a handle; one that is lost is made again."""
        recovery = Recovery("fetch", (), self._patience_s)
        while True:
            now = self.ledger.current(handle)
            assert isinstance(now, Handle)
            try:
                return await self._fleet.fetch(now)
            except TroubleError as trouble:
                # Whatever went wrong, the array cannot be had: that is the same as lost.
                lost = TroubleError("lost_handle", trouble.message, handle=trouble.handle or now.id)
                step = recovery.failed(now.owner, lost)
                if isinstance(step, GiveUp):
                    raise step.error from trouble
                await self._make_again(lost.handle or now.id)

    async def renew(self) -> None:
        """Renew the leases of everything that the request holds."""
        for executor, handles in self.ledger.held().items():
            await self._fleet.renew(executor, handles, LEASE_S)

    async def close(self) -> None:
        """Release everything that the request holds; call it once nothing runs for it any more."""
        for executor, handles in self.ledger.release().items():
            await self._fleet.release(executor, handles)

    def _enter(self, invocation: Invocation) -> InvocationTrace:
        size = array_bytes(invocation.inputs)
        return self.trace.begin(invocation.component, invocation.number, invocation.piece, size)

    def _recovery(self, invocation: Invocation) -> Recovery:
        component = invocation.component
        return Recovery(
            component,
            self._router.candidates(component),
            self._patience_s,
            # One that a path leads over is there, or will be again.
            comes_back=component in self._router.components,
        )

    def _order(self, invocation: Invocation, inputs: dict[str, Value]) -> ExecutorOrder:
        # Inputs name handles as they were; the ledger knows what has taken their place.
        current = self.ledger.current(inputs)
        assert isinstance(current, dict)
        # Always positive, though the deadline may have passed.
        left_s = max(0.001, self._deadline_s - self.trace.now_s())
        return ExecutorOrder(invocation.component, current, self.trace.request, left_s, LEASE_S)

    async def _choose(self, recovery: Recovery, invocation: Invocation) -> str:
        """Return the executor to try, once there is one."""
        while True:
            # Others may run it by now than when the invocation began.
            recovery.candidates = self._router.candidates(invocation.component)
            pick = await self._picker(invocation) if self._dynamic else self._static(invocation)
            step = recovery.choose(self._fleet.dead(), pick, self.trace.now_s())
            if isinstance(step, GiveUp):
                raise step.error
            if isinstance(step, Pause):
                await self._fleet.change(step.seconds)
                continue
            return step.executor

    def _static(self, invocation: Invocation) -> Callable[[Collection[str]], str | None]:
        component = invocation.component
        if invocation.piece is None:
            return lambda closed: self.route.executor(component, closed)
        return lambda closed: self.route.spread(component, self._pieces_of(component), closed)

    def _pieces_of(self, component: str) -> Counter[str]:
        return self._pieces.setdefault(component, Counter())

    @contextlib.contextmanager
    def _at_work(self, invocation: Invocation, executor: str) -> Iterator[None]:
        """Note that an executor is at work on an invocation, if that is a piece of a cut stream."""
        count = int(invocation.piece is not None)
        pieces = self._pieces_of(invocation.component)
        pieces[executor] += count
        try:
            yield
        finally:
            pieces[executor] -= count

    async def _picker(self, invocation: Invocation) -> Callable[[Collection[str]], str | None]:
        """Ask every executor for its queue; the shortest is taken, pieces of a stream stay together."""
        component, dead = invocation.component, self._fleet.dead()
        names = [name for name in self._router.candidates(component) if name not in dead]
        # Pieces of a stream go where the first of them went.
        kept = self._kept.get(invocation.number) if invocation.piece is not None else None
        lengths: dict[str, int] = {}
        if kept is None or kept in dead:
            found = await asyncio.gather(
                *(self._fleet.queue(name, component) for name in names), return_exceptions=True
            )
            for name, length in zip(names, found, strict=True):
                # One that does not say how long its queue is, is left out of the comparison.
                if isinstance(length, int):
                    lengths[name] = length
                elif not isinstance(length, TroubleError):
                    raise length

        def pick(closed: Collection[str]) -> str | None:
            executor = kept
            if executor is None or executor in closed:
                open_ones = {name: n for name, n in lengths.items() if name not in closed}
                shortest = min(open_ones.values(), default=0)
                longer = [name for name in names if open_ones.get(name) != shortest]
                executor = self._router.assign(component, {*closed, *longer})
                # None of the shortest queues can be had: any executor that is open will do.
                executor = executor or self._router.assign(component, closed)
            if executor is not None:
                self.route.replace(component, executor)
                if invocation.piece is not None:
                    self._kept[invocation.number] = executor
            return executor

        return pick

    async def _mend(
        self,
        recovery: Recovery,
        executor: str,
        trouble: TroubleError,
        entry: InvocationTrace,
        began_s: float,
    ) -> None:
        """Do what a failure asks for before the next attempt; raises where there is none."""
        self._observe(recovery.component, executor, trouble.code, self.trace.now_s() - began_s)
        entry.troubles.append(f"{executor}: {trouble.code}")
        entry.attempts = recovery.attempts
        step = recovery.failed(executor, trouble)
        if isinstance(step, GiveUp):
            raise step.error from trouble
        if isinstance(step, Remake):
            await self._make_again(step.handle)

    async def _make_again(self, handle: str) -> None:
        """Run what made a handle once more; several that miss it wait for one run."""
        key = self.ledger.maker(handle)
        made = self._made.get(key) if isinstance(key, tuple) else None
        if made is None:
            raise ApiError(500, "something that the request brought is lost", kind="server_error")
        invocation, before = made
        async with self._locks.setdefault(_key(invocation), asyncio.Lock()):
            # Another that missed it has made it again while this one waited.
            if self.ledger.successor(handle) is not None:
                return
            before = self._made[_key(invocation)][1]
            if invocation.streams:
                pieces: list[Value] = []
                async with contextlib.aclosing(self.stream(invocation)) as items:
                    async for item in items:
                        value = item.value if isinstance(item, Final) else item
                        # The same choice as in `stream`, so that old and new pieces match one by one.
                        if isinstance(item, Final) or array_bytes(value):
                            pieces.append(value)
                after: Value = pieces
            else:
                after = await self.call(invocation)
            self.ledger.made_again(before, after)

    def _finish(
        self,
        invocation: Invocation,
        entry: InvocationTrace,
        recovery: Recovery,
        executor: str,
        outcome: ExecutorOutcome,
        began_s: float,
    ) -> None:
        now_s = self.trace.now_s()
        self.ledger.grant(executor, outcome.value, _key(invocation))
        entry.executor = executor
        entry.took_s = now_s - entry.started_s
        entry.waited_s, entry.ran_s = outcome.waited_s, outcome.ran_s
        entry.batch = outcome.batch
        entry.output_bytes = array_bytes(outcome.value)
        entry.attempts = recovery.attempts
        self._observe(invocation.component, executor, "ok", now_s - began_s)


def _key(invocation: Invocation) -> _Key:
    return (invocation.number, invocation.piece)
