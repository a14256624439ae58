"""A gateway that a controller asks and tells: traffic as it was sent, weights that change who serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.control.operation.gateways import GatewayAddress, GatewayGroup
from atoll.plan.plan import Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.runtime.gateway.settings import GatewayLimits
from atoll.runtime.pool.routes import MAX_BYTES
from atoll.workload.lengths import LengthMix
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, Bench, chat, running
from tests.runtime.waiting import until

TRAFFIC, ROUTES = "/atoll/v1/traffic", "/atoll/v1/routes"
PROMISE = {"ttft_s": 30.0, "tpot_s": 30.0, "target": 0.9}
LONG = next(
    text
    for text in map(str, range(100))
    if expected(CHAT, chat(text, max_tokens=40)).reason == "length"
)
"""Something whose answer has all of its tokens."""


async def put(bench: Bench, body: object) -> Any:
    reply = await bench.admin(ROUTES, body, method="PUT")
    assert reply.status == 200, reply.body
    return reply.json


async def minute(bench: Bench, model: str = "m") -> dict[str, Any]:
    await bench.settled()
    found: dict[str, Any] = (await bench.admin(TRAFFIC)).json["models"][model]["minute"]
    return found


async def test_weights_change_who_serves() -> None:
    async with running([ScriptedEngine(), ScriptedEngine()]) as bench:

        async def served(count: int) -> Counter[str]:
            before = {e.name: len(e.seen) for e in bench.engines}
            for _ in range(count):
                assert (await bench.post(CHAT, chat(max_tokens=2))).status == 200
            return Counter(
                {e.name: n for e in bench.engines if (n := len(e.seen) - before[e.name])}
            )

        assert (await bench.admin(ROUTES)).json == {"fleet": "", "models": {}, "hash": None}
        assert await served(8) == {"e0": 4, "e1": 4}
        told = await put(bench, {"models": {"m": {"weights": {"e0": 0.75, "e1": 0.25}}}})
        assert (await bench.admin(TRAFFIC)).json["routes"] == told["hash"]
        assert await served(8) == {"e0": 6, "e1": 2}
        await put(bench, {"models": {"m": {"weights": {"e0": 0.0, "e1": 1.0}}}})
        assert await served(8) == {"e1": 8}
        await put(bench, {})
        assert await served(8) == {"e0": 4, "e1": 4}


async def test_traffic_is_what_was_sent() -> None:
    async with running([ScriptedEngine(), ScriptedEngine()]) as bench:
        await put(bench, {"models": {"m": {"promise": PROMISE}, "unserved": {"promise": PROMISE}}})
        for number in range(12):
            body = chat("x" * number, max_tokens=5 + number, stream=number % 2 == 0)
            assert (await bench.post(CHAT, body)).status == 200
        assert (await bench.post(CHAT, chat(model="made-up"))).status == 404
        assert (await bench.post(CHAT, b"{")).status == 400
        assert (await bench.post(CHAT, chat(model="unserved"))).status == 404
        said = await minute(bench)
        records = [r for r in bench.records if r.outcome == "ok"]
        assert len(records) == said["arrivals"] == said["measured"] == 12
        prompts = [r.prompt_tokens for r in records]
        answers = [r.completion_tokens for r in records]
        assert min(prompts) > 0
        assert said["input_sum"] == sum(prompts)
        assert said["input_square_sum"] == sum(p * p for p in prompts)
        assert said["output_sum"] == sum(answers)
        assert said["output_square_sum"] == sum(a * a for a in answers)
        assert (said["judged"], said["kept"]) == (12, 12)
        unserved = await minute(bench, "unserved")
        assert (unserved["arrivals"], unserved["judged"], unserved["kept"]) == (1, 1, 0)
        assert "made-up" not in (await bench.admin(TRAFFIC)).json["models"]


async def test_failed_and_late_ones_are_not_kept() -> None:
    async with running([ScriptedEngine()]) as bench:
        tight = {"ttft_s": 30.0, "tpot_s": 0.001, "target": 0.9}
        await put(bench, {"models": {"m": {"promise": tight}}})
        bench.engines[0].step_s = 0.02
        await bench.post(CHAT, chat(max_tokens=8, stream=True))
        assert ((await minute(bench))["judged"], (await minute(bench))["kept"]) == (1, 0)
        await put(bench, {"models": {"m": {"promise": PROMISE}}})
        await bench.post(CHAT, chat(max_tokens=8, stream=True))
        assert ((await minute(bench))["judged"], (await minute(bench))["kept"]) == (2, 1)
        bench.engines[0].faults += [Fault("500")] * 10
        reply = await bench.post(CHAT, chat(max_tokens=8))
        assert reply.status >= 500
        said = await minute(bench)
        assert (said["arrivals"], said["measured"]) == (3, 2)
        assert (said["judged"], said["kept"]) == (3, 1)


async def test_refused_at_the_door_count() -> None:
    async with running([ScriptedEngine(step_s=0.01)], limits=GatewayLimits(requests=1)) as bench:
        await put(bench, {"models": {"m": {"promise": PROMISE}}})
        slow = asyncio.create_task(bench.post(CHAT, chat(max_tokens=40, stream=True)))
        while not bench.gateway.relays:
            await asyncio.sleep(0.005)
        assert (await bench.post(CHAT, chat())).status == 503
        assert (await slow).status == 200
        said = await minute(bench)
        assert (said["arrivals"], said["judged"], said["kept"]) == (2, 2, 1)


async def test_waiting_for_room_counts_from_the_arrival() -> None:
    async with running(
        [ScriptedEngine(step_s=0.01)], max_inflight=1, affinity=True, queue_s=60.0
    ) as bench:
        short = {"ttft_s": 0.15, "tpot_s": 30.0, "target": 0.9}
        await put(bench, {"models": {"m": {"promise": short}}})
        slow = asyncio.create_task(bench.post(CHAT, chat(LONG, max_tokens=40, stream=True)))
        while not bench.engines[0].running:
            await asyncio.sleep(0.005)
        # Its own first token comes at once, but only when the other has ended, 0.4 s later.
        assert (await bench.post(CHAT, chat("another", max_tokens=2, stream=True))).status == 200
        await slow
        said = await minute(bench)
        assert (said["arrivals"], said["judged"]) == (2, 2)
        assert said["kept"] <= 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ({"models": {"m": {"weights": {"e0": -1}}}}, 400),
        (b" " * (MAX_BYTES + 1), 413),
    ],
)
async def test_what_cannot_be_told_changes_nothing(body: object, status: int) -> None:
    async with running([ScriptedEngine()]) as bench:
        told = await put(bench, {"models": {"m": {"weights": {"e0": 1.0}}}})
        reply = await bench.admin(ROUTES, body, method="PUT")
        assert reply.status == status
        assert "\n" not in reply.json["error"]["message"]
        assert (await bench.admin(ROUTES)).json == told


async def test_requests_wait_in_order_while_every_backend_is_full() -> None:
    waiting: dict[str, Any] = {"affinity": True, "max_inflight": 2, "queue_s": 5.0}
    async with running([ScriptedEngine(step_s=0.002)], **waiting) as bench:
        asked = [
            asyncio.create_task(bench.post(CHAT, chat(f"{i}", stream=True, max_tokens=10)))
            for i in range(6)
        ]
        await until(lambda: bench.gateway.queue.waiting)
        assert bench.gateway.pool.members["e0"].inflight == 2
        assert [r.status for r in await asyncio.gather(*asked)] == [200] * 6
        assert not bench.gateway.queue.waiting
    waiting |= {"max_inflight": 1, "queue_s": 0.2}
    async with running([ScriptedEngine(step_s=0.03)], **waiting) as bench:
        first = asyncio.create_task(bench.post(CHAT, chat(LONG, stream=True, max_tokens=20)))
        await until(lambda: bench.engines[0].running)
        reply = await bench.post(CHAT, chat())
        assert reply.status == 503
        assert "busy" in reply.json["error"]["message"]
        assert (await first).status == 200
        assert not bench.gateway.queue.waiting


async def test_conversations_stay_where_they_began() -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    async with running(engines, affinity=True) as bench:

        async def ask(body: dict[str, Any], headers: str = "") -> str:
            """Who answers."""
            before = [len(engine.seen) for engine in engines]
            assert (await bench.post(CHAT, body, headers)).status == 200
            (home,) = (e for e, n in zip(engines, before, strict=True) if len(e.seen) > n)
            return home.name

        for number in range(4):
            messages = [{"role": "user", "content": f"question {number}"}]
            homes = set()
            for turn in range(3):
                homes.add(await ask(chat(messages=messages, max_tokens=2)))
                messages += [
                    {"role": "assistant", "content": "an answer"},
                    {"role": "user", "content": f"and {turn}?"},
                ]
            assert len(homes) == 1
        assert sum(bool(engine.seen) for engine in engines) > 1
        homes = {
            await ask(chat(f"{number}", max_tokens=2), "x-atoll-session: abc\r\n")
            for number in range(4)
        }
        assert len(homes) == 1
        assert bench.gateway.pool.decisions["affinity"] >= 4 * 2 + 3


CHAT_SERVICE = Service(
    name="m",
    model="llama-3.1-8b",
    ttft_s=30.0,
    tpot_s=30.0,
    rate_per_s=0.001,
    lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
    phases="together",
    attainment=0.9,
)
PROBLEM = Problem(
    name="fleet",
    services=(CHAT_SERVICE,),
    offers=(Offer(region="here", node_type="L40S:1", available=4, usd_per_hour=1.0),),
    settings=Settings(max_nodes_per_instance=1, engine="none"),
)


async def test_controller_over_two_gateways(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("right\n")
    async with (
        running([ScriptedEngine(), ScriptedEngine()]) as one,
        running([ScriptedEngine(), ScriptedEngine()], admin_token="right") as two,
    ):
        said: list[str] = []
        missing = GatewayAddress("http://localhost", tmp_path / "nobody.sock")
        group = GatewayGroup(
            PROBLEM,
            [
                GatewayAddress("http://localhost", one.gateway.admin_socket),
                GatewayAddress(f"http://127.0.0.1:{two.port}", token_file=token),
                missing,
            ],
            say=said.append,
        )
        both = [Route(service="m", instances=(f"e{k}",), share=0.5) for k in range(2)]
        await asyncio.to_thread(group.route, both)
        # What had a share and has none any more takes no requests.
        routes = [Route(service="m", instances=("e1",), share=1.0)]
        await asyncio.to_thread(group.route, routes)
        for bench, count in ((one, 20), (two, 30)):
            for _ in range(count):
                await bench.post(CHAT, chat(max_tokens=3))
            await bench.settled()
            assert [len(e.seen) for e in bench.engines] == [0, count]
        report = await asyncio.to_thread(group.look, 1e9)
        (seen,) = report.traffic
        rates = [(await minute(b))["arrivals"] / (await minute(b))["seconds"] for b in (one, two)]
        assert seen.service == "m"
        assert seen.minute.rate_per_s == pytest.approx(sum(rates), rel=0.5)
        assert seen.hour.lengths is not None
        tokens = [r.prompt_tokens for b in (one, two) for r in b.records]
        assert seen.hour.lengths.input_mean == pytest.approx(sum(tokens) / len(tokens))
        (promise,) = report.promises
        assert (promise.requests, promise.kept, promise.target) == (50, 1.0, 0.9)
        await asyncio.to_thread(group.look, 1e9)
        # The missing one is told of once, each for being left out and for not being told.
        assert len(said) == 2
        assert all("nobody.sock" in line for line in said)
        # One that forgot what it was told is told again at the next look.
        await put(two, {})
        await asyncio.to_thread(group.look, 1e9)
        assert two.gateway.pool.routes == one.gateway.pool.routes == group.told()
