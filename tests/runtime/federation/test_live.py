"""A gateway on a real fabric: policies, models, failover, deadlines, what the answer says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Gpu, Hardware, NodeService, SessionState
from tests.runtime.federation.live import Site, Worker, shown, site
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, chat
from tests.runtime.waiting import until


def long_question() -> str:
    """Something whose answer does not end before it must."""
    return next(
        text
        for text in map(str, range(100))
        if expected(CHAT, chat(text, max_tokens=80)).reason == "length"
    )


LONG = long_question()


def text_of(**more: Any) -> str:
    return expected(CHAT, chat(**more)).text


TEXT, TEXT80 = text_of(), text_of(text=LONG, max_tokens=80)


async def test_any_node_serves_and_the_answer_says_which(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        assert (await fabric.chat()).status == 404
        await fabric.worker(
            "lab",
            "ETH",
            region="eu-west",
            engine_version="0.9.1",
            services=[NodeService("m", precision="bf16", context=8192)],
        )
        reply = await fabric.chat(stream=True)
        assert reply.text == TEXT
        said = {k: v for k, v in reply.headers.items() if k.startswith("x-atoll")}
        sid = next(iter(fabric.gateway.pool.members))
        assert said == {
            "x-atoll-model": "m",
            "x-atoll-node": "lab/n1",
            "x-atoll-sid": sid,
            "x-atoll-provider": "ETH",
            "x-atoll-region": "eu-west",
            "x-atoll-engine": "vllm/0.9.1",
            "x-atoll-precision": "bf16",
        }
        plain = await fabric.chat()
        assert plain.headers["x-atoll-provider"] == "ETH"
        await fabric.bench.settled()
        record = fabric.records[0]
        (attempt,) = record.attempts
        assert (attempt.node, attempt.provider, attempt.outcome) == ("lab/n1", "ETH", "ok")
        assert attempt.tokens == record.completion_tokens > 0
        models = shown(await fabric.bench.get("/v1/models"))["data"]
        assert [m["id"] for m in models] == ["m"]


async def three(fabric: Site) -> dict[str, Worker]:
    h100 = Hardware(gpus=(Gpu("H100-SXM", 1, 80 * 2**30),))
    a100 = Hardware(gpus=(Gpu("NVIDIA A100-SXM4-80GB", 1, 80 * 2**30),))
    return {
        "eth": await fabric.worker(
            "eth",
            "ETH",
            region="eu-west",
            hardware=h100,
            stability="reserved",
            services=[NodeService("m", precision="bf16", context=32768)],
        ),
        "epfl": await fabric.worker(
            "epfl",
            "EPFL",
            region="eu-west",
            hardware=a100,
            services=[NodeService("m", precision="fp8", context=8192)],
        ),
        "cloud": await fabric.worker(
            "cloud",
            "Acme",
            region="us-east",
            stability="spot",
            services=[NodeService("m", precision="int4")],
        ),
    }


async def test_policies_of_requests(tmp_path: Path) -> None:
    async with site(tmp_path, policy="iwrr", affinity=False) as fabric:
        await three(fabric)
        for headers, allowed in (
            ("x-atoll-providers: ETH,EPFL\r\n", {"ETH", "EPFL"}),
            ("x-atoll-regions: us\r\n", {"Acme"}),
            ("x-atoll-min-precision: fp8\r\n", {"ETH", "EPFL"}),
            ("x-atoll-min-context: 10000\r\n", {"ETH"}),
            ("x-atoll-gpus: A100\r\n", {"EPFL"}),
            ("x-atoll-stability: standard\r\n", {"ETH", "EPFL"}),
            ("x-atoll-node: cloud\r\n", {"Acme"}),
            ("x-atoll-regions: eu\r\nx-atoll-min-precision: bf16\r\n", {"ETH"}),
        ):
            replies = [await fabric.chat(headers, max_tokens=2) for _ in range(3)]
            assert {r.headers["x-atoll-provider"] for r in replies} == allowed, headers
        reply = await fabric.chat("x-atoll-providers: Nobody\r\n")
        assert reply.status == 503
        assert "retry-after" in reply.headers
        assert shown(reply)["error"]["code"] == "policy_unmet"
        assert shown(reply)["error"]["message"] == (
            "no node of a trusted provider serves m now: 3 of a provider that is not trusted"
        )
        reply = await fabric.chat("x-atoll-regions: us\r\nx-atoll-min-precision: fp32\r\n")
        assert shown(reply)["error"]["message"].endswith(
            "2 in another region, 1 below the precision asked for"
        )
        reply = await fabric.chat("x-atoll-min-precision: best\r\n")
        assert reply.status == 400
        assert shown(reply)["error"]["param"] == "x-atoll-min-precision"
        page = (await fabric.bench.admin("/metrics")).body.decode()
        assert 'atoll_policy_refusals_total{reason="provider"} 1' in page
        assert 'atoll_fabric_members{state="serving"}' in page


async def test_failover_obeys_the_policy(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        slow = ScriptedEngine(step_s=0.1)
        first = await fabric.worker("a", "ETH", engine=slow)
        second = await fabric.worker("b", "Acme")
        third = await fabric.worker("c", "ETH", wait=False)
        await until(lambda: third.fabric.sid in fabric.gateway.pool.members)
        await third.announce(services=())
        await until(lambda: third.fabric.sid not in fabric.gateway.pool.members)
        running = asyncio.create_task(
            fabric.chat("x-atoll-providers: ETH\r\n", stream=True, text=LONG, max_tokens=80)
        )
        await until(lambda: slow.running == 1)
        await asyncio.sleep(0.2)
        await third.announce(services=(NodeService("m"),))
        await until(lambda: third.fabric.sid in fabric.gateway.pool.members)
        await first.die()
        reply = await running
        assert reply.text == TEXT80
        assert not second.engine.seen
        await fabric.bench.settled()
        (record,) = fabric.records
        assert [a.node for a in record.attempts] == ["a/n1", "c/n1"]
        assert [a.outcome for a in record.attempts] == ["failed", "ok"]
        assert sum(a.tokens for a in record.attempts) == record.completion_tokens
        assert record.attempts[0].tokens > 0


async def test_exact_then_alias_then_fallback(tmp_path: Path) -> None:
    async with site(tmp_path, aliases={"gpt-4o": "big"}) as fabric:
        small = await fabric.worker(
            "s", engine=ScriptedEngine(model="small"), services=[NodeService("small")]
        )
        big = await fabric.worker(
            "b",
            engine=ScriptedEngine(model="big"),
            services=[NodeService("big", aliases=("large",))],
        )
        for name in ("gpt-4o", "large", "big"):
            reply = await fabric.chat(model=name)
            assert reply.headers["x-atoll-model"] == "big"
            assert big.engine.seen[-1].body["model"] == "big"
        assert (await fabric.chat(model="none")).status == 404
        reply = await fabric.chat("x-atoll-fallback: nothing, small\r\n", model="none")
        assert reply.headers["x-atoll-model"] == "small"
        reply = await fabric.chat(model="none", models=["small"])
        assert reply.headers["x-atoll-model"] == "small"
        assert "models" not in small.engine.seen[-1].body
        # A policy that nobody meets for the model itself may be met by one that stands in.
        reply = await fabric.chat("x-atoll-fallback: small\r\nx-atoll-node: s\r\n", model="big")
        assert reply.headers["x-atoll-model"] == "small"
        reply = await fabric.chat("x-atoll-node: s\r\n", model="big")
        assert reply.status == 503
        names = [m["id"] for m in shown(await fabric.bench.get("/v1/models"))["data"]]
        assert names == ["small", "big", "gpt-4o", "large"]


async def test_known_model_without_nodes_is_unavailable_not_unknown(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        worker = await fabric.worker("a")
        assert (await fabric.chat()).status == 200
        await worker.announce(services=())
        await until(lambda: not fabric.gateway.pool.members)
        reply = await fabric.chat()
        assert reply.status == 503
        assert shown(reply)["error"]["code"] == "model_unavailable"


async def test_requests_wait_for_a_node_that_is_back_in_a_moment(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        worker = await fabric.worker("a")
        sid = worker.fabric.sid
        fabric.gateway.pool.mask(sid, "its token is gone")
        asked = asyncio.create_task(fabric.chat())
        await asyncio.sleep(0.3)
        assert not worker.engine.seen
        fabric.gateway.pool.set_health(sid, up=True)
        assert (await asked).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("common", [True, False], ids=["nodes die anyway", "only with it"])
async def test_nodes_that_vanish_before_a_token_cost_no_attempt(
    tmp_path: Path, common: bool
) -> None:
    """Unless they do so only where one request is: then it is what they die of."""
    async with site(tmp_path, attempts=1) as fabric:
        doomed = [
            await fabric.worker(f"d{i}", engine=ScriptedEngine(faults=[Fault("stall")]))
            for i in range(3)
        ]
        if common:
            fabric.gateway.deaths.note("another", fabric.gateway.loop.time())
        # Their status is there at once, a token never: chats would begin with an event of their own.
        body = {"model": "m", "prompt": "Hi", "stream": True, "max_tokens": 8}
        asked = asyncio.create_task(fabric.bench.post("/v1/completions", body))
        while doomed and not asked.done():
            await until(lambda: asked.done() or any(w.engine.seen for w in doomed))
            victim = next((w for w in doomed if w.engine.seen), None)
            if victim is None:
                break
            doomed.remove(victim)
            if not doomed:
                await fabric.worker("well")
            await asyncio.sleep(0.1)
            await victim.die()
        reply = await asked
        assert reply.status == (200 if common else 422)
        assert (b"[DONE]" if common else b"poison_request") in reply.body
        assert len(fabric.records[-1].backends) == (4 if common else 2)


async def test_engines_that_are_gone_for_a_moment_cost_no_attempt(tmp_path: Path) -> None:
    faults = [*[Fault("die_before_head")] * 3, Fault("500")]
    async with site(tmp_path, attempts=2) as fabric:
        worker = await fabric.worker("a", engine=ScriptedEngine(faults=list(faults)))
        body = {"model": "m", "prompt": "Hi", "stream": True, "max_tokens": 8}
        reply = await fabric.bench.post("/v1/completions", body)
        # The node is there all the time, and only the error is a failure: one try is left after it.
        assert reply.status == 200
        assert b"[DONE]" in reply.body
        assert len(worker.engine.seen) == 5


async def test_node_that_ends_starts_nothing_long_and_hands_over(tmp_path: Path) -> None:
    async with site(tmp_path, handover_s=1.0) as fabric:
        slow = ScriptedEngine(step_s=0.1)
        ending = await fabric.worker("a", engine=slow)
        running = asyncio.create_task(fabric.chat(stream=True, text=LONG, max_tokens=80))
        await until(lambda: slow.running == 1)
        await asyncio.sleep(0.2)
        other = await fabric.worker("b")
        await ending.announce(ends_s=time.time() + 1.5)
        await until(lambda: fabric.gateway.pool.ending)
        for _ in range(4):
            assert (await fabric.chat()).headers["x-atoll-node"] == "b/n1"
        reply = await running
        assert reply.text == TEXT80
        await fabric.bench.settled()
        assert [a.node for a in fabric.records[-1].attempts] == ["a/n1", "b/n1"]
        assert slow.cancelled or not slow.running
        await other.announce(ends_s=time.time() + 3600.0)
        await ending.announce(SessionState.DOWN)
        await until(lambda: len(fabric.gateway.pool.members) == 1)
        assert (await fabric.chat()).status == 200


@pytest.mark.slow
async def test_what_cannot_go_on_elsewhere_stays_on_a_node_that_ends(tmp_path: Path) -> None:
    async with site(tmp_path, handover_s=120.0) as fabric:
        slow = ScriptedEngine(kind="openai", step_s=0.01)
        ending = await fabric.worker("a", engine=slow)
        asked = fabric.chat(stream=True, text=LONG, max_tokens=80, temperature=1.0)
        running = asyncio.create_task(asked)
        await until(lambda: slow.running == 1)
        await asyncio.sleep(0.1)
        await fabric.worker("b", engine=ScriptedEngine(kind="openai"))
        await ending.announce(ends_s=time.time() + 110.0)
        await until(lambda: fabric.gateway.pool.ending)
        assert (await running).text == TEXT80
        await fabric.bench.settled()
        assert [a.node for a in fabric.records[0].attempts] == ["a/n1"]


async def test_nodes_that_do_not_take_our_requests_are_not_asked(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        closed = await fabric.worker("a", "Acme", accept="self", wait=False)
        await fabric.worker("b", "Acme", accept="allow:front")
        for _ in range(3):
            assert (await fabric.chat()).headers["x-atoll-node"] == "b/n1"
        told = shown(await fabric.bench.admin("/atoll/v1/fabric"))
        why = {n["sid"]: n["unused_because"] for n in told["nodes"]}
        assert why[closed.fabric.sid] == "it does not take requests of ours"
        assert len(told["hubs"]) == 1
        assert told["connected"]
        assert "revoked" not in told["hubs"][0]


async def test_services_that_are_no_models(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        worker = await fabric.worker("a", services=[NodeService("echo", kind="generic")])
        reply = await fabric.bench.post("/services/echo/v1/completions?x=1", chat())
        assert reply.status == 200
        assert worker.engine.seen[-1].path == "/v1/completions?x=1"
        assert (await fabric.bench.get("/services/echo/health")).json == {"status": "ok"}
        assert (await fabric.bench.get("/services/none/health")).status == 404
        assert (await fabric.chat(model="echo")).status == 404
        assert shown(await fabric.bench.get("/v1/models"))["data"] == []


async def test_straight_where_the_address_answers_else_through_the_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.federation.federation._LOOK_S", 0.05)
    async with site(tmp_path) as fabric:
        engine = ScriptedEngine(model="other")
        await engine.start()
        worker = await fabric.worker("a", engine=engine, direct=engine.url)
        member = fabric.gateway.pool.members[worker.fabric.sid]
        upstreams = fabric.gateway.upstreams(member)
        await asyncio.sleep(0.2)
        # The address is of this machine, which a node elsewhere cannot mean.
        assert upstreams.direct is None  # type: ignore[attr-defined]
        monkeypatch.setattr("atoll.runtime.federation.upstreams._elsewhere", lambda *_: True)
        monkeypatch.setattr("atoll.runtime.federation.federation._PROBE_AGAIN_S", 0.0)
        await asyncio.sleep(0.2)
        # It answers, but not with the models of the node.
        assert upstreams.direct is None  # type: ignore[attr-defined]
        engine.model = "m"
        await until(lambda: upstreams.direct is not None)  # type: ignore[attr-defined]
        before = worker.bridge.requests
        assert (await fabric.chat()).status == 200
        assert worker.bridge.requests == before
        upstreams.direct._port = 1  # type: ignore[attr-defined]
        upstreams.drop_idle()
        monkeypatch.setattr("atoll.runtime.federation.federation._PROBE_AGAIN_S", 60.0)
        assert (await fabric.chat()).status == 200
        assert worker.bridge.requests == before + 1


@pytest.mark.slow
async def test_what_runs_straight_leaves_a_node_whose_token_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.federation.upstreams._elsewhere", lambda *_: True)
    async with site(tmp_path, flap_s=0.1, policy="iwrr", affinity=False) as fabric:
        slow = ScriptedEngine(step_s=0.1)
        await slow.start()
        silent = await fabric.worker("a", engine=slow, direct=slow.url)
        upstreams = fabric.gateway.upstreams(fabric.gateway.pool.members[silent.fabric.sid])
        await until(lambda: upstreams.direct is not None)  # type: ignore[attr-defined]
        running = asyncio.create_task(fabric.chat(stream=True, text=LONG, max_tokens=80))
        await until(lambda: slow.running == 1)
        await asyncio.sleep(0.2)
        assert silent.bridge.requests == 0
        await fabric.worker("b")
        # The machine goes silent, though its engine would still answer.
        await silent.fabric._link.close()
        reply = await running
        assert reply.text == TEXT80
        await fabric.bench.settled()
        assert [a.node for a in fabric.records[0].attempts] == ["a/n1", "b/n1"]


async def test_load_that_others_cause_counts(tmp_path: Path) -> None:
    async with site(tmp_path, affinity=False) as fabric:
        workers = [
            await fabric.worker(f"w{i}", engine=ScriptedEngine(step_s=0.01)) for i in range(2)
        ]
        for _ in range(6):
            await fabric.chat(max_tokens=5)
        workers[0].fabric.say_load(Load(running=40, waiting=10))
        member = fabric.gateway.pool.members[workers[0].fabric.sid]
        await until(lambda: member.elsewhere == 50)
        nodes = {(await fabric.chat(max_tokens=5)).headers["x-atoll-node"] for _ in range(4)}
        assert nodes == {"w1/n1"}


async def test_spans_traces_and_opting_out(tmp_path: Path) -> None:
    spans, recorder = Spy(), Spy()
    async with site(tmp_path, spans=spans, recorder=recorder) as fabric:
        await fabric.worker("a")
        given = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        await fabric.chat(f"traceparent: {given}\r\n")
        await fabric.chat()
        await fabric.bench.settled()
        (first, second) = [call for name, call in spans.calls if name == "request"]
        assert first[0].attempts[0].node == "a/n1"
        assert first[1][3:35] == "a" * 32
        assert first[2] == given
        assert second[2] is None
        assert [c[1] for name, c in recorder.calls if name == "record"] == ["m", "m"]


class Spy:
    """Remembers what was said to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def mark_sampled(self, trace: str) -> str:
        return trace

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, given))


async def test_parts_of_models_and_unknown_engines(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        part = await fabric.worker("a", services=[NodeService("m", layers=(0, 8))], wait=False)
        await until(lambda: fabric.federation.fabric.peer(part.fabric.sid))
        await asyncio.sleep(0.1)
        assert not fabric.gateway.pool.members
        await fabric.worker("b", engine_name="something/1")
        (member,) = fabric.gateway.pool.members.values()
        assert member.backend.kind == "openai"


async def test_machines_of_a_fabric_are_shown_with_their_load_and_price(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        first = await fabric.worker("a", "Acme", price_usd_per_hour=1.5)
        second = await fabric.worker("b", "Acme", price_usd_per_hour=0.5)
        for worker in (first, second):
            worker.fabric.say_load(Load(running=2, waiting=1, capacity=8, kv_used=0.25))
        await until(lambda: len(fabric.federation.fabric.loads) == 2)
        machines = shown(await fabric.bench.admin("/atoll/v1/machines"))["machines"]
        nodes = {m["id"]: m for m in machines if m["role"] == "node"}
        assert set(nodes) == {first.fabric.sid, second.fabric.sid}
        # No GPU was looked at.
        no_gpus = {"gpu_share": None, "memory_share": None}
        load = {"running": 2, "waiting": 1, "capacity": 8, "kv_share": 0.25, **no_gpus}
        assert [m["load"] for m in nodes.values()] == [load, load]
        assert shown(await fabric.bench.admin("/atoll/v1/snapshot"))["usd_per_hour"] == 2.0
        assert len(shown(await fabric.bench.admin("/atoll/v1/models"))["models"]) == 1
