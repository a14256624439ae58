"""What fails inside the transport stays inside: no end of the process, no backtrace for users."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import zenoh

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub
from atoll.fabric.transport.link import FabricLink
from atoll.fabric.transport.panics import CONTAINED, hushed, split_panics
from tests.fabric.transport.site import SETTINGS, ListLog, Scenario, Site

PANIC = """
thread 'net-2' (11336) panicked at zenoh/src/net/routing/dispatcher/resource.rs:486:27:
called `Option::unwrap()` on a `None` value
stack backtrace:
   0: __rustc::rust_begin_unwind
note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.
"""


class PanicException(BaseException):
    """As the transport's binding calls its own."""


def test_panics_and_errors_of_the_transport_end_there_and_nothing_else_does() -> None:
    for error in (PanicException("unwrap on None"), zenoh.ZError("closed")):
        with CONTAINED:
            raise error
    for other in (KeyboardInterrupt, SystemExit, ValueError):
        with pytest.raises(other), CONTAINED:
            raise other


def test_panics_are_kept_from_users_and_other_words_are_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with hushed() as panics:
        os.write(2, b"before\n" + PANIC.encode())
        os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"
    assert len(panics) == 1
    assert panics[0].startswith("thread 'net-2'")
    assert split_panics("") == ("", [])
    assert split_panics("thread 'x' waits\n") == ("thread 'x' waits\n", [])


def test_a_hub_whose_transport_panics_at_its_end_still_ends(
    run: Scenario, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(site: Site) -> None:
        hub: Hub = site.hubs.pop(0)
        fabric: Fabric = hub.fabric
        session = fabric._link._session

        class Panicking:
            def __getattr__(self, name: str) -> object:
                return getattr(session, name)

            def close(self) -> None:
                session.close()  # type: ignore[no-untyped-call]
                os.write(2, PANIC.encode())
                raise PanicException("unwrap on None")

        monkeypatch.setattr(fabric._link, "_session", Panicking())
        await hub.close()
        log = hub._log
        assert isinstance(log, ListLog)
        told = dict(log.events)["hub.transport_failed"]
        assert told["count"] == 1
        await site.hub(0)  # its port is free

    run(scenario)
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.slow
async def test_a_hub_stopped_under_traffic_ends_well_and_says_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    accesses = [site.issue(f"a{number}") for number in range(4)]
    hub = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll", "hub", f"@{site.authority.folder}/hub-h0.token"),
        *("--listen", f"127.0.0.1:{site.ports[0]}", "--log", str(tmp_path / "log")),
        env=os.environ | {"RUST_BACKTRACE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert hub.stdout is not None
    assert b"listens at" in await hub.stdout.readline()
    links = [await FabricLink.open(access, SETTINGS) for access in accesses]
    sids = [keys.new_sid(access.identity.slot, os.urandom(8)) for access in accesses]
    for link, sid in zip(links, sids, strict=True):
        link.subscribe(keys.inward_all(sid), lambda _: None)
        link.hear(f"{keys.PREFIX}/reg/**", lambda _: None)
        link.token(keys.alive(sid))
    for turn in range(20):
        for link, access in zip(links, accesses, strict=True):
            for sid in sids:
                link.put(keys.inward(sid, access.identity.slot), bytes(500))
        if turn == 10:
            hub.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.002)
    closing = [asyncio.create_task(link.close()) for link in links]
    _, said = await hub.communicate()
    await asyncio.gather(*closing)
    assert hub.returncode == 0
    assert [line for line in said.splitlines() if not line.startswith(b"watching ")] == []
