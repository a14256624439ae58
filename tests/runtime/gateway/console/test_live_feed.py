"""Who listens to snapshots, under a clock of the test's and without a socket."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from atoll.runtime.gateway.console.live_feed import LiveFeed
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.http.http_server import Responder
from atoll.runtime.openai import ApiError
from tests.runtime.gateway.console.viewing import KeptLog, View


@dataclass
class Transport:
    """What a client has not read."""

    unread: int = 0

    def get_write_buffer_size(self) -> int:
        return self.unread


@dataclass
class Client:
    """A connection whose client reads everything at once, or nothing."""

    reads: bool = True
    transport: Transport = field(default_factory=Transport)
    exchange: Responder | None = None
    events: list[bytes] = field(default_factory=list)
    fate: str = "new"

    def begin_stream(self, headers: bytes = b"") -> None:
        del headers
        self.fate = "open"

    def send(self, data: bytes) -> None:
        self.events.append(data)
        if not self.reads:
            self.transport.unread += len(data)

    def end_stream(self, data: bytes) -> None:
        del data
        self.fate = "ended"

    def abort(self) -> None:
        self.fate = "aborted"
        assert self.exchange is not None
        self.exchange.cancel()


@dataclass
class Maker:
    """Makes pages that differ, and counts them."""

    made: int = 0
    broken: bool = False

    def __call__(self) -> bytes:
        if self.broken:
            raise RuntimeError("no page")
        self.made += 1
        return b'{"number":%d}' % self.made


def join(feed: LiveFeed, client: Client) -> Client:
    feed.join(client)  # type: ignore[arg-type]  # a transport of which only the buffer is looked at
    return client


def test_200_listeners_cost_one_computation_a_tick() -> None:
    view = View()
    view.add("b", "m")
    pages = GatewaySnapshots(view)
    feed = LiveFeed(view, pages.snapshot)
    clients = [join(feed, Client()) for _ in range(200)]
    assert pages.made == 1
    for tick in range(1, 6):
        view.clock.run(2.0)
        assert pages.made == 1 + tick
    assert {len(client.events) for client in clients} == {6}
    # The very same bytes, not as many copies.
    assert len({id(client.events[-1]) for client in clients}) == 1
    kind, data = clients[0].events[-1].removesuffix(b"\n\n").split(b"\n")
    assert kind == b"event: snapshot"
    assert json.loads(data.removeprefix(b"data: "))["backends"] == 1


def test_nothing_is_done_while_nobody_listens() -> None:
    view, make = View(), Maker()
    feed = LiveFeed(view, make)
    assert view.clock.waiting == 0
    first, second = join(feed, Client()), join(feed, Client())
    view.clock.run(10.0)
    assert make.made == 6
    for client in (first, second):
        assert client.exchange is not None
        client.exchange.cancel()
    view.clock.run(60.0)
    assert (make.made, view.clock.waiting) == (6, 0)
    # Who comes later is told how it stands then.
    late = join(feed, Client())
    assert late.events == [b'event: snapshot\ndata: {"number":7}\n\n']


def test_who_never_reads_has_one_snapshot_waiting_and_is_let_go() -> None:
    view, make = View(), Maker()
    feed = LiveFeed(view, make)
    idle, other = join(feed, Client(reads=False)), join(feed, Client())
    client_s = view.settings.deadlines.client_s
    view.clock.run(client_s)
    assert (len(idle.events), idle.fate) == (1, "open")
    view.clock.run(4.0)
    assert idle.fate == "aborted"
    assert len(feed.listeners) == 1
    assert len(other.events) == 1 + (client_s + 4.0) / 2.0


def test_slow_reader_goes_on_with_the_newest() -> None:
    view, make = View(), Maker()
    feed = LiveFeed(view, make)
    slow = join(feed, Client(reads=False))
    view.clock.run(20.0)
    slow.transport.unread = 0
    view.clock.run(2.0)
    assert [json.loads(event[22:]) for event in slow.events] == [{"number": 1}, {"number": 12}]
    # What it was slow with is forgotten.
    view.clock.run(59.0)
    assert slow.fate == "open"


def test_number_of_listeners_is_bounded() -> None:
    view = View()
    feed = LiveFeed(view, Maker(), max_listeners=3)
    clients = [join(feed, Client()) for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        join(feed, Client())
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
    assert clients[0].exchange is not None
    clients[0].exchange.cancel()
    assert join(feed, Client()).fate == "open"


def test_one_key_does_not_take_all_places() -> None:
    view = View()
    feed = LiveFeed(view, Maker(), max_listeners=8)
    for _ in range(2):
        feed.join(Client(), lambda: True, "eve")  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        feed.join(Client(), lambda: True, "eve")  # type: ignore[arg-type]
    assert caught.value.status == 503
    feed.join(Client(), lambda: True, "bob")  # type: ignore[arg-type]
    assert [join(feed, Client()).fate for _ in range(5)] == ["open"] * 5


def test_streams_end_when_the_gateway_stops() -> None:
    view = View()
    feed = LiveFeed(view, Maker())
    clients = [join(feed, Client()) for _ in range(3)]
    view.draining = True
    feed.close()
    assert all(client.fate == "ended" for client in clients)
    assert (len(feed.listeners), view.clock.waiting) == (0, 0)
    with pytest.raises(ApiError) as caught:
        join(feed, Client())
    assert caught.value.status == 503


def test_key_that_is_good_no_more_ends_the_stream() -> None:
    view = View()
    feed = LiveFeed(view, Maker())
    allowed = [True]
    revoked, admin = Client(), Client()
    feed.join(revoked, lambda: allowed[0])  # type: ignore[arg-type]
    join(feed, admin)
    view.clock.run(60.0)
    assert (revoked.fate, admin.fate) == ("open", "open")
    allowed[0] = False
    view.clock.run(30.0)
    assert (revoked.fate, admin.fate) == ("ended", "open")


def test_page_that_cannot_be_made_ends_nothing() -> None:
    view, make = View(log=KeptLog()), Maker()
    feed = LiveFeed(view, make)
    client = join(feed, Client())
    make.broken = True
    view.clock.run(4.0)
    make.broken = False
    view.clock.run(2.0)
    assert len(client.events) == 2
    assert isinstance(view.log, KeptLog)
    assert [name for name, _ in view.log.events] == ["live.bug", "live.bug"]
