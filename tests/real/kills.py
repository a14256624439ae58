"""Engines killed in mid-stream, and how others take over what they had begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.real.counting_model import CITIES, count
from tests.real.features import (
    CHAT,
    COUNT,
    MANY_FIELDS,
    TOOLS,
    WEATHER,
    Lacks,
    build_schema,
    chat,
    fits_schema,
    join_calls,
    join_text,
    require,
)
from tests.real.fleet import Fleet, Json, Stream

_TOKENS = 600
_BEFORE = 12
"""Events that every client has before the engine dies."""
_TRIES = 40


def _check_text(events: list[Json]) -> None:
    require(join_text(events) == count(0, _TOKENS), "text is lost or doubled")
    usage = [event["usage"] for event in events if event.get("usage")]
    require(bool(usage) and usage[-1]["completion_tokens"] == _TOKENS, "usage is wrong")


def _check_calls(events: list[Json]) -> None:
    cities = [arguments.get("city") for _, arguments in join_calls(events)]
    require(cities == [*CITIES], "calls are lost or doubled")


def _check_form(events: list[Json]) -> None:
    require(fits_schema(join_text(events), MANY_FIELDS), "the form is broken")


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table: what is asked, and what must have come in the end."""

    name: str
    body: Mapping[str, Any]
    check: Callable[[list[Json]], None]


KINDS = (
    Kind(
        "takes over a killed stream: text",
        chat(COUNT, _TOKENS, stream_options={"include_usage": True}),
        _check_text,
    ),
    Kind("takes over a killed stream: calls", chat(WEATHER, tools=TOOLS), _check_calls),
    Kind(
        "takes over a killed stream: JSON schema",
        chat(COUNT, 1200, response_format=build_schema(MANY_FIELDS)),
        _check_form,
    ),
)


@dataclass
class Client:
    """Reads one stream in a thread of its own; `begun` is set after a few events."""

    stream: Stream
    events: list[Json] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    broke: str = ""

    def read(self) -> None:
        """Read to the end."""
        try:
            for event in self.stream:
                self.events.append(event)
                if len(self.events) == _BEFORE:
                    self.begun.set()
        except (OSError, ValueError) as error:
            self.broke = f"the connection broke: {error}"
        self.over.set()
        self.begun.set()


def kill_in_midstream(fleet: Fleet, victim: str, heir: str) -> dict[str, Mapping[str, str]]:
    """Begin a stream of each kind at one engine, kill it, and return how the other took over.

    Both must be serving. The victim is gone afterwards.
    """
    with ExitStack() as open_streams:
        clients: dict[str, Client] = {}
        for kind in KINDS:
            client = clients[kind.name] = Client(_begin_at(fleet, victim, heir, kind))
            open_streams.callback(client.stream.close)
        threads = [threading.Thread(target=client.read) for client in clients.values()]
        for thread in threads:
            thread.start()
        for client in clients.values():
            client.begun.wait()
        in_time = {name: not client.over.is_set() for name, client in clients.items()}
        fleet.kill(victim)
        for thread in threads:
            thread.join()
    return {
        kind.name: _judge(kind, clients[kind.name], in_time[kind.name], victim) for kind in KINDS
    }


def _begin_at(fleet: Fleet, victim: str, heir: str, kind: Kind) -> Stream:
    """Begin streams until one is served by the victim, which the other may take over."""
    for _ in range(_TRIES):
        stream = fleet.door(f"{victim}, {heir}").stream(CHAT, {**kind.body})
        if stream.headers.get("x-atoll-node") == victim:
            return stream
        stream.close()
    raise AssertionError(f"the gateway never chose {victim}")


def _judge(kind: Kind, client: Client, in_time: bool, victim: str) -> Mapping[str, str]:
    assert in_time, f"{kind.name}: the answer was whole before {victim} was killed"
    try:
        require(not client.broke, client.broke)
        kind.check(client.events)
    except Lacks as lack:
        return {"word": "no", "why": str(lack)}
    return {"word": "yes"}
