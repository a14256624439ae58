"""A fleet on its way to a plan: turns until what is wanted serves and nothing else stands, or one fails."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.cli.progress import live_line
from atoll.core.errors import AtollError
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.control.decision.view import ObservedInstance
    from atoll.control.operation.home import Entrance, FleetHome, FleetRecord
    from atoll.control.operation.loop import FleetController, LoopTurn

LOOK_HERE_S = 0.5
LOOK_ELSEWHERE_S = 5.0
_OVER = ("failed", "gone")
_GIVE_UP = 3
"""Looks in a row in which a target does not answer until nobody waits for it any more."""


class NotUpError(AtollError):
    """Something of a fleet did not come up."""


@dataclass
class Rollout:
    """What was begun at `begun_s`; `opened` says that hub and gateway were started for it."""

    home: FleetHome
    record: FleetRecord
    controller: FleetController
    begun_s: float
    opened: bool = False
    failed: dict[str, None] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of all instances that are to serve."""
        return tuple(one.id for one in self.controller.memory.wanted)

    def wait(self, turn: LoopTurn, most_s: float) -> bool:
        """Take turns until everything serves; False where nobody wants to wait.

        Raises with the reason of what failed, or what it still waits for when the time is over.
        """
        names = self.record.targets.names
        every_s = LOOK_HERE_S if names == ("local",) else LOOK_ELSEWHERE_S
        until_s = time.monotonic() + most_s
        with live_line("starting", most_s) as say:
            silent = 0
            while True:
                self._find_failures(turn)
                late = time.monotonic() > until_s
                if self.failed and (late or not self._is_starting(turn)):
                    self._give_up()
                if self._is_settled(turn):
                    break
                if most_s <= 0:
                    return False
                if late:
                    raise NotUpError(
                        f"not all of {self.record.name} serves yet: {self._describe(turn)}",
                        hint=f"`atoll status {self.record.name}` shows how far it is; --wait waits longer",
                    )
                say(self._describe(turn))
                time.sleep(every_s)
                turn = self.controller.turn()
                silent = silent + 1 if turn.unreachable else 0
                if silent >= _GIVE_UP:
                    name = turn.unreachable[0]
                    raise NotUpError(f"{name}: {self.controller.reasons[name]}")
            say("waiting until the gateway has heard of all models")
            self._await_gateway(until_s)
        return True

    def _find_failures(self, turn: LoopTurn) -> None:
        """Note why instances that were started did not come up."""
        failed = [
            f"{seen.id}: {seen.standing.reason}"
            for seen in self._look(turn).values()
            if seen.standing.state == "failed" and seen.standing.since_s >= self.begun_s - 1.0
        ]
        refused = [text for text in turn.failures if not any(text in each for each in failed)]
        self.failed |= dict.fromkeys((*refused, *failed))

    def _is_starting(self, turn: LoopTurn) -> bool:
        """Whether something is still on its way: it may come up though another has not."""
        return any(seen.standing.state == "starting" for seen in turn.view.instances)

    def _give_up(self) -> None:
        """End what failed; where nothing is left, hub and gateway go as they came."""
        from atoll.control.operation.entrance import close_entrance

        name, failed = self.record.name, list(self.failed)
        turn = self.controller.turn()
        left = [s for s in turn.view.instances if s.standing.state in ("starting", "ready")]
        if not left and self.opened and self.record.entrance is not None:
            close_entrance(self.record.entrance)
            self.record = self.record.model_copy(update={"up": False})
            self.home.write(self.record)
            raise NotUpError(
                f"nothing of {name} came up: {failed[0]}", hint=f"`atoll history {name}`"
            )
        raise NotUpError(
            f"not all of {name} came up, {len(left)} serve or start: {failed[0]}",
            hint=f"`atoll operate {name}` tries again, `atoll down {name}` ends it",
        )

    def _look(self, turn: LoopTurn) -> dict[str, ObservedInstance]:
        """Return instances by name, and tell what has changed of them since the last look."""
        found = {seen.id: seen for seen in turn.view.instances}
        for name, seen in found.items():
            state = seen.standing.state
            if self.shown.get(name) != state and seen.standing.since_s >= self.begun_s:
                self.shown[name] = state
                why = f": {seen.standing.reason}" if seen.standing.reason else ""
                note(f"{name} is {state}{why}")
        return found

    def _is_settled(self, turn: LoopTurn) -> bool:
        seen, wanted = self._look(turn), self.wanted
        ready = all(name in seen and seen[name].standing.state == "ready" for name in wanted)
        # What failed stays listed for a while, though it was stopped and holds nothing.
        others = [n for n in seen if n not in wanted and seen[n].standing.state not in _OVER]
        return ready and not others and not turn.unreachable

    def _describe(self, turn: LoopTurn) -> str:
        """Say how far it is, and what of it is waited for."""
        seen, wanted = {one.id: one for one in turn.view.instances}, self.wanted
        ready = [n for n in wanted if n in seen and seen[n].standing.state == "ready"]
        waiting = []
        for name in (*wanted, *(n for n in seen if n not in wanted)):
            state = seen[name].standing.state if name in seen else "not started"
            if name in ready or (state in _OVER and name not in wanted):
                continue
            reason = seen[name].standing.reason if name in seen else ""
            waiting.append(f"{name} is {state}{f' ({reason})' if reason else ''}")
        return f"{len(ready)} of {len(wanted)} ready; {', '.join(waiting) or 'routes are told'}"

    def _await_gateway(self, until_s: float) -> None:
        """Wait until the gateway serves every model: what is ready has yet to be announced in the fabric."""
        entrance = self.record.entrance
        if entrance is None or entrance.url is None:
            return
        wanted = {one.service for one in self.controller.memory.wanted}
        while True:
            models = asyncio.run(_ask_models(entrance))
            missing = wanted - set(models or ())
            if models is None or not missing:
                return
            if time.monotonic() > until_s:
                raise NotUpError(
                    f"the gateway at {entrance.url} does not serve {', '.join(sorted(missing))} yet",
                    hint=f"`atoll logs {self.record.name} gateway`",
                )
            time.sleep(LOOK_HERE_S)


async def _ask_models(entrance: Entrance) -> list[str] | None:
    """Return what a gateway serves; None where it would not say without a key."""
    from atoll.runtime.http.client import FetchError, fetch

    socket = entrance.admin_socket
    page = "/v1/models" if socket is None else "/atoll/v1/status"
    try:
        code, body = await fetch(f"{entrance.url}{page}", unix_socket=socket)
        if code in (401, 403):
            return None
        said = json.loads(body)
        return list(said["models"]) if socket else [str(each["id"]) for each in said["data"]]
    except (FetchError, ValueError, KeyError, TypeError):
        return []
