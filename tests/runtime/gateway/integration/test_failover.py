"""Whatever a backend does, the client receives the answer of an undisturbed run, once."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from atoll.runtime.gateway import events
from atoll.runtime.gateway.backend_question import ask_backend
from atoll.runtime.gateway.settings import Deadlines, GatewayLimits, HealthSettings
from atoll.runtime.http.upstream import HttpUpstreamPool
from tests.runtime.gateway.engine import BAD_ANSWERS, Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import (
    CHAT,
    COMPLETIONS,
    QUICK,
    Bench,
    Json,
    Reply,
    chat,
    running,
)
from tests.runtime.waiting import until
from tests.seeds import slow_except

KINDS = ("atoll", "vllm", "sglang", "llamacpp", "openai")
IN_STREAM = (
    "die",
    "die_in_event",
    "split",
    "stall",
    "stall_in_event",
    "error_event",
    "bad_json",
    "end_early",
    "die_before_usage",
)
IMPATIENT = replace(QUICK, first_token_s=0.1, between_tokens_s=0.1, answer_s=0.1)
"""For engines of which none works: nothing is late that would have come."""
BEFORE = ("die_before_head", "die_after_head", "stall_before", "garbage", "500", "503", "429")


def streamed(**more: Any) -> Json:
    return chat(stream=True, stream_options={"include_usage": True}, **more)


def run(
    body: Json,
    *faults: list[Fault],
    kind: str = "vllm",
    path: str = CHAT,
    spare: int = 1,
    batch: int = 1,
    deadlines: Deadlines | None = None,
) -> tuple[Reply, Bench]:
    """Ask over engines with these faults, the first first, and `spare` good ones."""

    async def go() -> tuple[Reply, Bench]:
        engines = [ScriptedEngine(kind=kind, faults=list(f), batch=batch) for f in faults]
        engines += [ScriptedEngine(kind=kind, batch=batch) for _ in range(spare)]
        async with running(engines, deadlines=deadlines) as bench:
            reply = await bench.post(path, body)
            await bench.settled()
            return reply, bench

    return asyncio.run(go())


def check_stream(reply: Reply, bench: Bench, path: str, body: Json) -> None:
    """One stream, the text and the usage of an undisturbed run, counted once."""
    answer = expected(path, body)
    usage = answer.usage
    assert reply.status == 200
    assert reply.text == answer.text
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in reply.chunks}) == 1
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [answer.reason]
    assert choices[-1]["finish_reason"] == answer.reason
    if path == CHAT:
        assert [i for i, c in enumerate(choices) if "role" in c["delta"]] == [0]
    assert [c["usage"] for c in reply.chunks if c.get("usage")] == [usage]
    assert len(bench.records) == 1
    record = bench.records[0]
    assert (record.prompt_tokens, record.completion_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (record.status, record.outcome, record.estimated) == (200, "ok", False)
    assert all(m.inflight == 0 for m in bench.gateway.pool.members.values())


@pytest.mark.parametrize(
    ("what", "kind"),
    slow_except(
        [*((what, "vllm") for what in IN_STREAM), *(("die", kind) for kind in KINDS)],
        itertools.product(IN_STREAM, KINDS),
    ),
)
def test_stream_goes_on_elsewhere(what: str, kind: str) -> None:
    body = streamed()
    reply, bench = run(body, [Fault(what, 7)], kind=kind)
    check_stream(reply, bench, CHAT, body)
    assert bench.records[0].backends == ("e0", "e1")


@pytest.mark.parametrize("batch", [1, 4])
def test_a_mistake_of_the_client_in_mid_stream_is_passed_on(batch: int) -> None:
    reply, bench = run(streamed(), [Fault("mistake_event", 8)], batch=batch)
    error = json.loads(reply.events[-1])["error"]
    assert (error["message"], error["type"]) == ("no such tool", "invalid_request_error")
    assert error["param"] == "tools"
    assert bench.records[0].backends == ("e0",)
    assert [m.failures for m in bench.gateway.pool.members.values()] == [0, 0]


def test_a_stream_as_long_as_it_may_be_waits_for_its_end_as_often_as_others() -> None:
    """The end is all that is missing: a backend that stalls again has not gone on with it."""
    body = streamed(max_tokens=5)
    stalls = [Fault("stall_at_end")] * 20
    reply, bench = run(body, stalls, stalls, spare=0, deadlines=IMPATIENT)
    assert json.loads(reply.events[-1])["error"]["code"] == "stream_interrupted"
    assert len(bench.records[0].backends) <= 4


@pytest.mark.parametrize("what", list(BAD_ANSWERS))
def test_an_answer_that_is_none_is_asked_for_elsewhere(what: str) -> None:
    reply, bench = run(chat(), [Fault(what)])
    assert reply.json["choices"][0]["message"]["content"] == expected(CHAT, chat()).text
    assert bench.records[0].backends == ("e0", "e1")
    assert bench.gateway.pool.members["e0"].failures == 1
    reply, bench = run(chat(), [Fault(what)] * 3, spare=0)
    assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_error")


@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("stream", [True, False])
def test_failure_before_the_first_token_is_retried(what: str, stream: bool) -> None:
    body = streamed() if stream else chat()
    reply, bench = run(body, [Fault(what)])
    if stream:
        check_stream(reply, bench, CHAT, body)
    else:
        answer = expected(CHAT, body)
        assert reply.json["choices"][0]["message"]["content"] == answer.text
        assert reply.json["usage"] == answer.usage
        assert bench.records[0].completion_tokens == answer.usage["completion_tokens"]
    assert len(bench.records) == 1


def test_broken_answer_is_asked_for_again() -> None:
    reply, bench = run(chat(), [Fault("die_in_body")])
    assert reply.json["choices"][0]["message"]["content"] == expected(CHAT, chat()).text
    assert len(bench.records) == 1


@pytest.mark.parametrize(
    ("kind", "path", "after"),
    slow_except(
        [
            *((kind, CHAT, 11) for kind in KINDS),
            *(("vllm", CHAT, 0), ("atoll", COMPLETIONS, 1), ("openai", COMPLETIONS, 11)),
        ],
        itertools.product(KINDS, (CHAT, COMPLETIONS), (0, 1, 11)),
    ),
)
def test_stream_survives_several_deaths(kind: str, path: str, after: int) -> None:
    body = streamed(max_tokens=30)
    if path == COMPLETIONS:
        body = {k: v for k, v in body.items() if k != "messages"} | {"prompt": "Once upon"}
    faults = [Fault("die", after), Fault("die_in_event", 3), Fault("error_event", 2)]
    reply, bench = run(
        body, faults, [Fault("die", 4)], [Fault("die", 1), Fault("die", 2)], kind=kind, path=path
    )
    check_stream(reply, bench, path, body)


@pytest.mark.parametrize("kind", ["atoll", "vllm"])
@pytest.mark.parametrize("what", ["die_before_usage", "die"])
def test_stream_at_its_limit_ends_with_the_limit(kind: str, what: str) -> None:
    """All tokens are there, the end is not: not one token more is sent."""
    body = streamed(max_tokens=9)
    reply, bench = run(body, [Fault(what, 8 if what == "die" else 0)], kind=kind)
    check_stream(reply, bench, CHAT, body)
    assert reply.chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_end_mark_alone_is_not_missed() -> None:
    for what in ("die_before_done", "no_done"):
        body = streamed()
        reply, bench = run(body, [Fault(what)])
        check_stream(reply, bench, CHAT, body)
        assert bench.records[0].backends == ("e0",)


def test_usage_is_counted_but_not_shown_unless_asked_for() -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        body = chat(stream=True, **options)
        reply, bench = run(body, [Fault("die", 5)])
        answer = expected(CHAT, body)
        assert reply.text == answer.text
        assert all(not c.get("usage") and c["choices"] for c in reply.chunks)
        assert bench.records[0].completion_tokens == answer.usage["completion_tokens"]
        assert bench.records[0].prompt_tokens == answer.usage["prompt_tokens"]


def test_log_probabilities_count_tokens_of_bigger_chunks() -> None:
    body = streamed(logprobs=True, max_tokens=20)
    reply, bench = run(body, [Fault("die", 9)], batch=3)
    check_stream(reply, bench, CHAT, body)


def test_client_that_began_the_answer_itself() -> None:
    body = streamed(add_generation_prompt=False, continue_final_message=True)
    body["messages"] = [*body["messages"], {"role": "assistant", "content": "Well,"}]
    reply, bench = run(body, [Fault("die", 6)])
    check_stream(reply, bench, CHAT, body)


def test_sampled_stream_continues_but_is_not_replayed() -> None:
    body = streamed(temperature=1.0)
    reply, _ = run(body, [Fault("die", 6)], kind="vllm")
    assert reply.events[-1] == "[DONE]"
    reply, bench = run(body, [Fault("die", 6)], kind="openai")
    assert '"stream_interrupted"' in reply.events[-1]
    assert bench.records[0].outcome == "truncated"
    assert bench.records[0].completion_tokens == 6
    assert bench.records[0].estimated


def test_replay_that_differs_is_an_error_not_nonsense() -> None:
    async def go() -> Reply:
        engines = [
            ScriptedEngine(kind="openai", faults=[Fault("die", 6)]),
            ScriptedEngine(kind="openai", faults=[Fault("diverge")], batch=2),
        ]
        async with running(engines) as bench:
            return await bench.post(CHAT, streamed())

    reply = asyncio.run(go())
    assert "differs" in reply.events[-1]


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("500", 502, "upstream_error"),
        ("503", 503, "overloaded"),
        ("429", 429, "overloaded"),
        ("die_before_head", 422, "poison_request"),
        ("stall_before", 504, "upstream_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_when_all_fail_the_client_is_told(what: str, status: int, code: str, stream: bool) -> None:
    late = IMPATIENT if what.startswith("stall") else None
    reply, bench = run(chat(stream=stream), *[[Fault(what)] * 9] * 3, spare=0, deadlines=late)
    assert reply.status == status
    assert reply.json["error"]["code"] == code
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert sum(len(e.seen) for e in bench.engines) == (2 if status == 422 else 3)
    assert len(bench.records) == 1
    assert bench.records[0].outcome == "error"


def test_engine_that_refuses_a_request_is_believed() -> None:
    reply, bench = run(chat(), [Fault("bad_request")])
    assert reply.status == 400
    assert reply.json["error"]["message"] == "scripted refusal"
    assert len(bench.engines[1].seen) == 0


def test_closed_port_costs_no_attempt() -> None:
    async def go() -> tuple[Reply, Bench]:
        engines = [ScriptedEngine() for _ in range(5)]
        for engine in engines:
            await engine.start()
        for engine in engines[:4]:
            await engine.stop()
        async with running(engines) as bench:
            return await bench.post(CHAT, streamed()), bench

    reply, bench = asyncio.run(go())
    check_stream(reply, bench, CHAT, streamed())


def test_nobody_there_is_said_within_the_deadline() -> None:
    async def go() -> Reply:
        engines = [ScriptedEngine(), ScriptedEngine()]
        for engine in engines:
            await engine.start()
            await engine.stop()
        # Every other time it may take is far longer than the client waits for the reply.
        patient = replace(QUICK, first_token_s=600.0, between_tokens_s=600.0, retry_s=0.3)
        async with running(engines, deadlines=patient) as bench:
            return await bench.post(CHAT, streamed())

    assert asyncio.run(go()).status in (502, 503)


def test_stream_waits_for_the_only_backend_to_come_back() -> None:
    async def go() -> tuple[Reply, Bench]:
        engine = ScriptedEngine(step_s=0.01)
        async with running([engine]) as bench:
            asking = asyncio.create_task(bench.post(CHAT, streamed()))
            await asyncio.sleep(0.15)
            port = int(engine.url.rsplit(":", 1)[1])
            await engine.stop()
            await asyncio.sleep(0.3)
            await engine.start(port)
            return await asking, bench

    reply, bench = asyncio.run(go())
    check_stream(reply, bench, CHAT, streamed())
    assert len(bench.records[0].backends) > 1


def test_stream_leaves_a_backend_known_to_be_dead_at_once() -> None:
    async def go() -> tuple[Reply, Bench]:
        engines = [ScriptedEngine(faults=[Fault("stall", 5)]), ScriptedEngine()]
        # Far longer than the client waits for the reply.
        slow = replace(QUICK, first_token_s=600.0, between_tokens_s=600.0)
        async with running(engines, deadlines=slow) as bench:
            asking = asyncio.create_task(bench.post(CHAT, streamed()))
            await asyncio.sleep(0.2)
            bench.gateway.pool.set_health("e0", up=False, reason="killed")
            return await asking, bench

    reply, bench = asyncio.run(go())
    check_stream(reply, bench, CHAT, streamed())


async def test_health_checks_find_the_dead_and_trust_them_again_after_a_token() -> None:
    engine = ScriptedEngine()
    health = HealthSettings(interval_s=0.05, timeout_s=0.5, failures=2)
    async with running([engine], health=health) as bench:
        member = bench.gateway.pool.members["e0"]
        port = int(engine.url.rsplit(":", 1)[1])

        async def until(up: bool) -> None:
            async with asyncio.timeout(60):
                while member.up != up:
                    await asyncio.sleep(0.02)

        await engine.stop()
        await until(up=False)
        assert (await bench.post(CHAT, chat())).status == 503
        assert (await bench.get("/health")).status == 200
        reply = await bench.get("/ready")
        assert (reply.status, reply.json["without_backend"]) == (503, ["m"])
        engine.faults = [Fault("500")]
        await engine.start(port)
        await until(up=True)
        # The first token failed, so it was asked for twice.
        assert [s.body["max_tokens"] for s in engine.seen] == [1, 1]
        assert (await bench.post(CHAT, chat())).status == 200
        assert (await bench.get("/ready")).status == 200


async def test_backends_that_fail_late_leave_time_for_the_next() -> None:
    """Only time without a backend counts as search: two that took longer than it may are no reason."""
    engines = [
        *(ScriptedEngine(faults=[Fault("stall_before")]) for _ in range(2)),
        ScriptedEngine(),
    ]
    late = replace(QUICK, first_token_s=0.4, between_tokens_s=0.4, retry_s=0.2)
    async with running(engines, deadlines=late) as bench:
        pool = bench.gateway.pool
        pool.set_health("e2", up=False)
        asked = asyncio.create_task(bench.post(CHAT, streamed()))
        await until(lambda: all(engine.seen for engine in engines[:2]))
        pool.set_health("e2", up=True)
        reply = await asked
        assert reply.status == 200
        assert bench.records[-1].backends[-1] == "e2"
        assert len(bench.records[-1].backends) == 3


SOON = HealthSettings(interval_s=0.02, timeout_s=0.05, failures=2)


async def test_slow_is_not_dead_where_a_stream_goes_on() -> None:
    """Whoever is late with its health while it sends tokens keeps what it runs, and gets nothing new."""
    text = expected(CHAT, chat()).text
    engines = [ScriptedEngine(step_s=0.03), ScriptedEngine(busy=True)]
    async with running(engines, health=SOON) as bench:
        pool = bench.gateway.pool
        pool.set_health("e1", up=False)
        asked = asyncio.create_task(bench.post(CHAT, streamed()))
        await until(lambda: any(relay.begun for relay in bench.gateway.relays))
        engines[0].busy, engines[1].busy = True, False
        await until(lambda: pool.members["e0"].slow)
        assert pool.members["e0"].state == "slow"
        await until(lambda: pool.members["e1"].up)
        assert (await bench.post(CHAT, chat())).status == 200
        assert engines[1].seen[-1].body["messages"] == chat()["messages"]
        reply = await asked
        assert reply.text == text
        assert bench.records[-1].backends == ("e0",)
        engines[0].busy = False
        await until(lambda: pool.members["e0"].state == "up")


async def test_a_gateway_that_stood_still_holds_nothing_against_backends() -> None:
    """While it waits for a core it hears no answers: nobody is down for that."""
    health = HealthSettings(interval_s=0.02, timeout_s=0.04, failures=2)
    async with running([ScriptedEngine(), ScriptedEngine()], health=health) as bench:
        events: list[str] = []
        bench.gateway.pool.listeners.append(lambda event, member: events.append(event))
        await asyncio.sleep(0.1)
        # Every turn of the loop waits for a core, and an answer takes several.
        for _ in range(14):
            time.sleep(0.09)
            await asyncio.sleep(0)
        assert not {"down", "slow"} & set(events)


async def test_the_only_backend_is_kept_however_slow_it_is() -> None:
    engine = ScriptedEngine(busy=True)
    async with running([engine], health=SOON) as bench:
        await until(lambda: bench.gateway.pool.members["e0"].slow)
        assert (await bench.post(CHAT, chat())).status == 200
        alarms = (await bench.admin("/atoll/v1/snapshot")).json["alarms"]
        assert [alarm["id"] for alarm in alarms] == ["backend-slow:e0"]


@pytest.mark.parametrize(
    ("engines", "stream"),
    slow_except([(1, False), (4, True)], itertools.product((1, 2, 4), (False, True))),
)
async def test_late_answers_are_waited_for_where_nobody_is_left_to_ask(
    engines: int, stream: bool
) -> None:
    """A long prompt takes its time on every backend: the last one that may be asked goes on."""
    late = replace(QUICK, first_token_s=0.05, answer_s=0.05, between_tokens_s=60.0)
    health = HealthSettings(interval_s=0.02)
    slow = [ScriptedEngine(step_s=0.15) for _ in range(engines)]
    async with running(slow, deadlines=late, health=health) as bench:
        reply = await bench.post(CHAT, chat(stream=stream, max_tokens=2))
        assert reply.status == 200
        asked = bench.records[-1].backends
        assert len(set(asked)) == len(asked) <= bench.gateway.settings.attempts


async def test_who_is_late_and_sends_nothing_is_left_for_others() -> None:
    text = expected(CHAT, chat()).text
    # The second says nothing of itself, and so stays down, until the first has begun.
    engines = [ScriptedEngine(faults=[Fault("stall", 2)]), ScriptedEngine(busy=True)]
    patient = replace(QUICK, first_token_s=600.0, between_tokens_s=600.0)
    async with running(engines, health=SOON, deadlines=patient) as bench:
        pool = bench.gateway.pool
        pool.set_health("e1", up=False)
        asked = asyncio.create_task(bench.post(CHAT, streamed()))
        await until(lambda: any(relay.begun for relay in bench.gateway.relays))
        engines[0].busy, engines[1].busy = True, False
        reply = await asked
        assert reply.text == text
        assert bench.records[-1].backends == ("e0", "e1")


async def test_health_checks_leave_no_connection_behind() -> None:
    """Each has one of its own, however often it asks; requests keep theirs."""

    async with running([ScriptedEngine()]) as bench:
        gateway = bench.gateway
        member = gateway.pool.members["e0"]
        upstreams = gateway.upstreams(member)
        assert isinstance(upstreams, HttpUpstreamPool)
        assert (await bench.post(CHAT, chat())).status == 200
        kept = upstreams.open
        for _ in range(5):
            assert (await ask_backend(upstreams, "/health", timeout_s=2.0))[0] == 200
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert upstreams.open == kept == 1
        assert upstreams.take() is not None


async def test_connections_that_nobody_needs_any_more_are_closed() -> None:
    async with running([ScriptedEngine(step_s=0.01)]) as bench:
        gateway = bench.gateway
        upstreams = gateway.upstreams(gateway.pool.members["e0"])
        assert isinstance(upstreams, HttpUpstreamPool)
        await asyncio.gather(*(bench.post(CHAT, chat()) for _ in range(5)))
        assert upstreams.open > 1
        now_s = gateway.loop.time()
        upstreams.tick(now_s + 30.0)
        assert upstreams.take() is not None
        upstreams.tick(now_s + 90.0)
        assert upstreams.take() is None
        for _ in range(3):
            await asyncio.sleep(0)
        assert upstreams.open == 1


def test_client_that_leaves_cancels_the_work() -> None:
    async def go() -> tuple[Bench, int]:
        engine = ScriptedEngine(step_s=0.02)
        async with running([engine]) as bench:
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
            body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],"max_tokens":1000}'
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (CHAT.encode(), len(body), body)
            )
            got = b""
            while got.count(b"data:") < 4:
                got += await reader.read(4096)
            writer.close()
            await bench.settled()
            return bench, engine.cancelled

    bench, cancelled = asyncio.run(go())
    assert cancelled == 1
    (record,) = bench.records
    assert (record.status, record.outcome, record.estimated) == (499, "cancelled", True)
    assert record.completion_tokens >= 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sockets are told so on Linux only")
def test_little_is_sent_to_a_client_that_does_not_read() -> None:
    """Not what fits into the buffers of the machine, which are megabytes."""

    async def go() -> tuple[int, int]:
        engine = ScriptedEngine(batch=4000)
        async with running([engine], deadlines=replace(QUICK, between_tokens_s=30.0)) as bench:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", bench.port))
                body = json.dumps(streamed(max_tokens=10**6) | {"ignore_eos": True}).encode()
                head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                client.send(head % (CHAT.encode(), len(body)) + body)
                before = same = 0
                while same < 6:
                    await asyncio.sleep(0.05)
                    relay = next(iter(bench.gateway.relays), None)
                    if relay is None:
                        continue
                    relay.journal.read()
                    sent = relay.journal.folded
                    same = same + 1 if sent == before > 0 else 0
                    before = sent
                return before, engine.running

    sent, running_now = asyncio.run(go())
    assert sent < 2 * 2**20
    assert running_now == 1


def test_a_stream_without_an_end_is_given_up() -> None:
    async def go() -> tuple[Reply, Bench]:
        limits = GatewayLimits(answer_bytes=20_000)
        async with running([ScriptedEngine(step_s=0.001)], limits=limits) as bench:
            reply = await bench.post(CHAT, streamed(max_tokens=100_000, ignore_eos=True))
            return reply, bench

    with patch.object(events, "_FOLD_BYTES", 4096):
        reply, bench = asyncio.run(go())
    error = json.loads(reply.events[-1])["error"]
    assert (error["code"], error["message"]) == (
        "stream_interrupted",
        "the stream broke off: the answer is too large",
    )
    assert bench.gateway.pool.members["e0"].failures == 1
