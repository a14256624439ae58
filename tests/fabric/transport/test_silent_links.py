"""Links that say nothing: cut where the other side is dead, kept where anybody waits for a core."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.core.patience import MAX_EXTRA_S, Patience
from atoll.fabric.identity.access import Access
from atoll.fabric.transport import silent_links
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.silent_links import SilentLinks, data_age_s
from atoll.fabric.transport.zenoh_config import session_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")

EVERY_S = 0.25
KEEP_ALIVE_S = 0.5


class Links:
    """A session with links whose other ends speak every half second, but for pauses; no time passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peers: int = 1) -> None:
        self.now_s = 0.0
        self.looks = 0
        self.cut: list[str] = []
        self.pauses: dict[str, list[tuple[float, float]]] = {}
        self._open = {(f"tcp/127.0.0.1:{n + 2}", "tcp/127.0.0.1:1"): f"z{n}" for n in range(peers)}
        self.patience = Patience(EVERY_S)
        self._links = SilentLinks(cast("Any", self), FabricSettings())
        self.info = self
        names = dict(enumerate(self._open))
        monkeypatch.setattr(silent_links, "data_age_s", lambda n: self._age_s(self._open[names[n]]))
        found = {ends: number for number, ends in names.items()}
        monkeypatch.setattr(
            silent_links, "open_connections", lambda links: {e: found[e] for e in links}
        )
        monkeypatch.setattr(silent_links, "cut_link", self._cut)

    def links(self) -> list[SimpleNamespace]:
        self.looks += 1
        return [SimpleNamespace(src=s, dst=d, zid=zid) for (s, d), zid in self._open.items()]

    def _age_s(self, peer: str) -> float:
        said_s = self.now_s - self.now_s % KEEP_ALIVE_S
        for start_s, end_s in self.pauses.get(peer, ()):
            if start_s <= said_s < end_s:
                said_s = start_s
        return self.now_s - said_s

    def _cut(self, here: str, there: str) -> int:
        self.cut.append(self._open.pop((here, there)))
        return 1

    def run(self, seconds: float, every_s: float = EVERY_S) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += every_s
            self.patience.tick(self.now_s)
            self._links.look(self.patience, self.now_s)


def test_on_a_quiet_machine_silence_is_death_within_two_and_a_half_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Links(monkeypatch, peers=2)
    links.pauses["z1"] = [(10.0, 1e9)]
    links.run(11.9)
    assert not links.cut
    links.run(0.6)
    assert links.cut == ["z1"]


def test_who_was_late_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of a core, then a quarter, then a tenth, in turns of three seconds; then it dies."""
    links = Links(monkeypatch)
    links.pauses["z0"] = [(at_s, at_s + 1.5) for at_s in range(10, 40, 3)]
    links.pauses["z0"] += [(at_s, at_s + 2.25) for at_s in range(40, 70, 3)]
    links.pauses["z0"] += [(at_s, at_s + 2.7) for at_s in range(70, 100, 3)]
    links.run(110)
    assert not links.cut
    links.pauses["z0"] = [(110.0, 1e9)]
    links.run(15)
    assert links.cut == ["z0"]


def test_a_process_that_waits_for_a_core_itself_cuts_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came meanwhile is in the kernel; who is as late as this process is waited for."""
    links = Links(monkeypatch)
    links.run(20, every_s=4.0)
    links.pauses["z0"] = [(22.0, 28.0)]
    links.run(20, every_s=4.0)
    assert not links.cut


def test_whatever_the_delays_a_link_ends_before_the_transport_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Links(monkeypatch)
    links.patience.tell("z0", 1e4, 0.0)
    links.pauses["z0"] = [(5.0, 1e9)]
    links.run(2.0 + MAX_EXTRA_S + 6.0)
    assert links.cut == ["z0"]


def test_many_links_are_looked_at_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Links(monkeypatch, peers=2), Links(monkeypatch, peers=2000)
    for links in (few, many):
        monkeypatch.setattr(silent_links, "data_age_s", lambda descriptor: 0.0)
        monkeypatch.setattr(silent_links, "open_connections", lambda ends: dict.fromkeys(ends, 0))
        links.run(10)
    assert few.looks == 40
    assert many.looks == 10


def test_the_transport_is_patient_and_says_as_much_as_before() -> None:
    access = Access.open_at(["127.0.0.1:1"], name="x", provider="x", role="worker")
    config = session_config(access, FabricSettings(), ["127.0.0.1:1"], [], frozenset())
    sent = json.loads(config.get_json("transport/link/tx"))
    assert sent["lease"] == 1000 * (2 + MAX_EXTRA_S)
    assert sent["lease"] / sent["keep_alive"] == 1000 * KEEP_ALIVE_S


def test_the_kernel_says_when_data_came() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there = listener.accept()[0]
        there.send(b"x")
        assert here.recv(1) == b"x"
        assert data_age_s(here.fileno()) is not None
        # It is still whoever's it was.
        there.send(b"y")
        assert here.recv(1) == b"y"
        here.close()
        there.close()
    with Path("/dev/null").open("rb") as file:
        assert data_age_s(file.fileno()) is None
