"""Those who watch a gateway and take machines out of service, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from atoll.runtime.gateway.console import live_feed as live
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, QUICK, Bench, Reply, chat, running

EVENTS = "x-atoll-events: 1\r\n"


def comments(reply: Reply) -> list[dict[str, Any]]:
    """What a stream says beside its chunks; each comment is a line of its own before a blank one."""
    parts = reply.body.decode().split("\n\n")
    said = [part for part in parts if part.startswith(":")]
    assert all("\n" not in part and part.startswith(": atoll {") for part in said)
    return [json.loads(part.removeprefix(": atoll ")) for part in said]


def without_comments(reply: Reply) -> Reply:
    parts = [p for p in reply.body.split(b"\n\n") if not p.startswith(b":")]
    return Reply(reply.status, reply.headers, b"\n\n".join(parts))


async def test_snapshot_models_and_machines() -> None:
    async with running([ScriptedEngine(), ScriptedEngine()], admin_token="t") as bench:
        await bench.post(CHAT, chat(stream=True))
        await bench.settled()
        page = (await bench.admin("/atoll/v1/snapshot")).json
        (model,) = page["models"]
        assert (model["name"], model["backends"], model["up"]) == ("m", 2, 2)
        assert model["requests_per_s"] > 0
        assert model["first_token_s"] > 0
        models = (await bench.admin("/atoll/v1/models")).json
        assert [o["machine"] for o in models["models"][0]["offers"]] == ["e0", "e1"]
        assert {type(o["first_token_s"]) for o in models["models"][0]["offers"]} >= {float}
        machines = (await bench.admin("/atoll/v1/machines")).json
        assert [m["id"] for m in machines["machines"]] == ["e0", "e1"]
        assert page["version"] == models["version"] == machines["version"]
        assert (await bench.get("/atoll/v1/snapshot")).status == 401
        token = "authorization: Bearer t\r\n"
        assert (await bench.get("/atoll/v1/snapshot", token)).status == 200
        post = await bench.ask(f"POST /atoll/v1/live HTTP/1.1\r\nhost: x\r\n{token}\r\n".encode())
        assert post.status == 405


async def listen(bench: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(bench.gateway.admin_socket)
    writer.write(b"GET /atoll/v1/live HTTP/1.1\r\nhost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"text/event-stream" in head
    return reader, writer


async def next_snapshot(reader: asyncio.StreamReader) -> Any:
    while (line := await reader.readline()).startswith(b"data: ") is False:
        assert line, "the stream ended"
    return json.loads(line.removeprefix(b"data: "))


async def test_listeners_hear_and_are_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_EVERY_S", 0.02)

    async with running([ScriptedEngine()], deadlines=QUICK) as bench, asyncio.timeout(60):
        listeners = [await listen(bench) for _ in range(20)]
        first = [await next_snapshot(reader) for reader, _ in listeners]
        assert {page["status"] for page in first} == {"serving"}
        page = first[0]
        version = page["version"]
        bench.gateway.pool.set_health("e0", up=False, reason="gone")
        for reader, _ in listeners:
            while (page := await next_snapshot(reader))["version"] == version:
                pass
            assert [a["id"] for a in page["alarms"]] == ["model-unserved:m", "backend-down:e0"]
        assert (page["running"], page["models"][0]["requests_per_s"]) == (0, 0.0)
        assert not bench.gateway.relays
        # The gateway stops without waiting for them, and they are told that it is over.
        assert await bench.gateway.drain(60.0)
        for reader, writer in listeners:
            await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()
        refused = await bench.admin("/atoll/v1/live")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")


async def test_listener_that_leaves_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_EVERY_S", 0.02)

    async with running([ScriptedEngine()]) as bench, asyncio.timeout(60):
        feed = bench.gateway.live
        _, writer = await listen(bench)
        assert len(feed.listeners) == 1
        writer.close()
        while feed.listeners:
            await asyncio.sleep(0.01)


async def test_drained_machine_hands_its_streams_over() -> None:
    answer = expected(CHAT, chat()).text

    engines = [ScriptedEngine(step_s=0.01), ScriptedEngine(step_s=0.01)]
    async with running(engines) as bench, asyncio.timeout(60):
        pool = bench.gateway.pool
        pool.set_health("e1", up=False)
        asked = asyncio.create_task(bench.post(CHAT, chat(stream=True), EVENTS))
        while not any(relay.begun for relay in bench.gateway.relays):
            await asyncio.sleep(0.005)
        pool.set_health("e1", up=True)
        wrong = await bench.admin("/atoll/v1/machines/e0/drain", {"confirm": "e1"})
        assert (wrong.status, wrong.json["error"]["code"]) == (400, "confirmation_needed")
        done = await bench.admin("/atoll/v1/machines/e0/drain", {"confirm": "e0"})
        assert (done.status, done.json["drained"], done.json["id"]) == (200, True, "e0")
        reply = await asked
        assert without_comments(reply).text == answer
        assert [(c["event"], c["backend"], c["attempt"]) for c in comments(reply)] == [
            ("node", "e0", 1),
            ("node", "e1", 2),
        ]
        for _ in range(4):
            await bench.post(CHAT, chat(stream=True, max_tokens=2))
        assert len(engines[0].seen) == 1
        last = await bench.admin("/atoll/v1/machines/e1/drain", {"confirm": "e1"})
        assert (last.status, last.json["error"]["code"]) == (409, "last_backend")
        back = await bench.admin("/atoll/v1/machines/e0/drain", method="DELETE")
        assert (back.json["state"], back.json["drained"]) == ("up", False)
        for _ in range(4):
            await bench.post(CHAT, chat(stream=True, max_tokens=2))
        assert len(engines[0].seen) > 1


async def test_what_cannot_move_ends_on_the_drained_machine() -> None:
    answer = expected(CHAT, chat(max_tokens=20)).text

    engines = [ScriptedEngine(step_s=0.01), ScriptedEngine()]
    async with running(engines) as bench, asyncio.timeout(60):
        pool = bench.gateway.pool
        pool.set_health("e1", up=False)
        asked = asyncio.create_task(bench.post(CHAT, chat(stream=True, max_tokens=20)))
        whole = asyncio.create_task(bench.post(CHAT, chat(max_tokens=20)))
        while len(engines[0].seen) < 2 or not any(r.begun for r in bench.gateway.relays):
            await asyncio.sleep(0.005)
        forced = await bench.admin("/atoll/v1/machines/e0/drain", {"confirm": "e0", "force": True})
        assert forced.json["state"] == "draining"
        assert (await asked).text == answer
        assert (await whole).status == 200
        machines = (await bench.admin("/atoll/v1/machines")).json["machines"]
        assert [m["state"] for m in machines] == ["drained", "down"]
        assert (await bench.post(CHAT, chat())).status == 503
        assert (await bench.get("/ready")).status == 503


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_says_who_answers_and_who_goes_on(path: str) -> None:
    async def go() -> Reply:
        engines = [ScriptedEngine(faults=[Fault("die", 4)]), ScriptedEngine()]
        async with running(engines) as bench:
            return await bench.post(path, body | {"stream": True}, EVENTS)

    body = chat() if path == CHAT else {"model": "m", "prompt": "Once", "temperature": 0}
    reply = asyncio.run(go())
    assert reply.body.startswith(b": atoll {")
    first, second = comments(reply)
    assert first == {
        "event": "node",
        "node": "e0",
        "backend": "e0",
        "provider": None,
        "attempt": 1,
    }
    assert (second["backend"], second["attempt"]) == ("e1", 2)
    assert without_comments(reply).text == expected(path, body).text
    # What it says comes between pieces, once more for the one that goes on.
    parts = reply.body.split(b"\n\n")
    assert [n for n, part in enumerate(parts) if part.startswith(b":")][1] > 3


@pytest.mark.parametrize("headers", ["", "x-atoll-events: 0\r\n", "x-atoll-events: yes\r\n"])
def test_stream_of_others_says_nothing(headers: str) -> None:
    async def go() -> Reply:
        async with running([ScriptedEngine(faults=[Fault("die", 4)]), ScriptedEngine()]) as bench:
            return await bench.post(CHAT, chat(stream=True), headers)

    assert b"\n:" not in b"\n" + asyncio.run(go()).body


def test_whole_answers_and_other_dialects_say_nothing() -> None:
    async def go() -> list[Reply]:
        async with running([ScriptedEngine()]) as bench:
            message = {"model": "m", "max_tokens": 9, "messages": chat()["messages"]}
            return [
                await bench.post(CHAT, chat(), EVENTS),
                await bench.post("/v1/messages", message | {"stream": True}, EVENTS),
                await bench.post(
                    "/v1/responses", {"model": "m", "input": "a", "stream": True}, EVENTS
                ),
            ]

    for reply in asyncio.run(go()):
        assert reply.status == 200
        assert b": atoll" not in reply.body
