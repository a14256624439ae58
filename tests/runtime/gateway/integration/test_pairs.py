"""Prompts on one backend and answers on another: the client sees one answer, whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from atoll.plan.plan import Route
from atoll.routing.instances import InstanceRouter, route_tables
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, QUICK, Bench, chat, running
from tests.runtime.gateway.integration.conftest import ROOT, Fleet
from tests.runtime.gateway.kv_engine import KvEngine
from tests.runtime.waiting import until
from tests.seeds import slow_except

PATIENT = replace(QUICK, first_token_s=10.0, between_tokens_s=10.0, answer_s=10.0)
LONG = next(
    text
    for text in map(str, range(100))
    if expected(CHAT, chat(text, max_tokens=40)).reason == "length"
)
"""Something whose answer has all of its tokens."""


def prefill(**more: Any) -> KvEngine:
    return KvEngine(phase="prefill", **more)


def decode(**more: Any) -> KvEngine:
    return KvEngine(phase="decode", **more)


@asynccontextmanager
async def serving(engines: Sequence[ScriptedEngine], **more: Any) -> AsyncIterator[Bench]:
    """Run a gateway, of which no engine may have been asked anything wrong."""
    async with running(engines, **{"deadlines": PATIENT, **more}) as bench:
        yield bench
        await bench.settled()
        assert [w for e in engines if isinstance(e, KvEngine) for w in e.wrong] == []


def outcomes(bench: Bench) -> dict[str, int]:
    page = bench.gateway.metrics.page(0, 0).decode()
    lines = [line for line in page.splitlines() if line.startswith("atoll_gateway_prefills_total{")]
    return {
        line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "min_tokens": 2},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    ],
)
async def test_an_answer_over_two_backends_is_that_of_one(
    path: str, stream: bool, more: Any
) -> None:
    first, second = prefill(), decode()
    body = chat(LONG, max_tokens=20, stream=stream, **more)
    if path == COMPLETIONS:
        if "tools" in more:
            return
        body = {**body, "prompt": "once upon", "logprobs": None}
    if stream:
        body["stream_options"] = {"include_usage": True}
    wanted = expected(path, body)
    async with serving([first, second]) as bench:
        reply = await bench.post(path, body)
        assert reply.status == 200, reply.body
        assert reply.headers["x-atoll-path"] == "prefill=e0 decode=e1"
        if stream:
            assert reply.text == wanted.text
            (usage,) = [c["usage"] for c in reply.chunks if c.get("usage")]
        else:
            (choice,) = reply.json["choices"]
            said = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert said == wanted.text
            usage = reply.json["usage"]
        # The prompt counts once, though two have seen it.
        assert usage == wanted.usage
        await bench.settled()
        (record,) = bench.records
        assert record.prompt_tokens == wanted.usage["prompt_tokens"]
        assert record.completion_tokens == wanted.usage["completion_tokens"]
        assert record.backends == ("e1",)
        assert (first.kept, second.fetched, second.own, second.recomputed) == ({}, 1, 0, 0)
        assert outcomes(bench) == {"handed over": 1}


async def test_pairs_are_dealt_as_the_simulator_deals_them() -> None:
    """The ways of a plan, one after the other, by the router that the simulator's tables are of."""
    shares = {("e0", "e2"): 0.5, ("e0", "e3"): 0.1, ("e1", "e3"): 0.3, ("e4",): 0.1}
    engines = [prefill(), prefill(), decode(), decode(), ScriptedEngine()]
    weights: Counter[str] = Counter()
    for way, share in shares.items():
        weights.update(dict.fromkeys(way, share))
    routes = [Route(service="m", instances=way, share=share) for way, share in shares.items()]
    router = InstanceRouter(route_tables(routes, {}))
    planned = [router.route() for _ in range(60)]
    async with serving(engines) as bench:
        told = {
            "models": {
                "m": {
                    "weights": dict(weights),
                    "pairs": [[*way, share] for way, share in shares.items() if len(way) > 1],
                }
            }
        }
        assert (await bench.admin("/atoll/v1/routes", told, method="PUT")).status == 200
        found = []
        for _ in planned:
            reply = await bench.post(CHAT, chat("x", max_tokens=1))
            path = reply.headers.get("x-atoll-path", "prefill=e4").split()
            found.append(tuple(part.partition("=")[2] for part in path))
        assert found == planned
        counted = Counter(found)
        assert {way: round(counted[way] / len(found), 2) for way in shares} == shares


FAULTS = ["500", "503", "429", "no_params", "stall_before"]


@pytest.mark.parametrize("what", [*FAULTS, "die_before_head"])
async def test_a_prefill_that_fails_is_replaced_once(what: str) -> None:
    bad, good, last = prefill(faults=[Fault(what)]), prefill(), decode()
    wanted = expected(CHAT, chat(LONG, max_tokens=10))
    async with serving([bad, good, last], deadlines=replace(PATIENT, prefill_s=0.3)) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=10))
        assert reply.json["choices"][0]["message"]["content"] == wanted.text
        assert reply.headers["x-atoll-path"] == "prefill=e1 decode=e2"
        assert (len(bad.seen), len(good.seen), last.fetched) == (1, 1, 1)
        assert outcomes(bench) == {"replaced": 1, "handed over": 1}


@pytest.mark.parametrize("what", FAULTS)
async def test_where_two_fail_decode_computes_the_prompt(what: str) -> None:
    bad, last = [prefill(faults=[Fault(what)]) for _ in range(3)], decode()
    wanted = expected(CHAT, chat(LONG, max_tokens=10))
    async with serving([*bad, last], deadlines=replace(PATIENT, prefill_s=0.3)) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=10))
        assert reply.json["choices"][0]["message"]["content"] == wanted.text
        assert "x-atoll-path" not in reply.headers
        assert sum(len(e.seen) for e in bad) == 2
        assert (last.own, last.fetched) == (1, 0)
        assert outcomes(bench) == {"replaced": 1, "recomputed": 1}


async def test_a_prompt_that_kills_two_is_sent_to_nobody_else() -> None:
    bad, last = [prefill(faults=[Fault("die_before_head")] * 2) for _ in range(2)], decode()
    async with serving([*bad, last]) as bench:
        for _ in range(2):
            assert (await bench.post(CHAT, chat(LONG))).json["error"]["code"] == "poison_request"
        assert [len(e.seen) for e in (*bad, last)] == [1, 1, 0]


async def test_a_slow_prefill_is_cancelled_and_replaced() -> None:
    slow, quick, last = prefill(slow_s=0.6, kept_s=0.1), prefill(), decode()
    told = {"deadlines": replace(PATIENT, prefill_s=0.2)}
    async with serving([slow, quick, last], **told) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=5))
        assert reply.json["choices"][0]["message"]["content"]
        await until(lambda: not slow.running)
        assert (slow.kept, slow.cancelled) == ({}, 1)
        assert (last.fetched, last.own) == (1, 0)


async def test_unknown_blocks_are_refused_and_computed_again() -> None:
    first, last = prefill(faults=[Fault("wrong_blocks")], kept_s=0.1), decode()
    wanted = expected(CHAT, chat(LONG, max_tokens=8))
    async with serving([first, last]) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=8))
        assert reply.json["choices"][0]["message"]["content"] == wanted.text
        assert (last.fetched, last.recomputed) == (0, 1)
        # Nobody fetched it: it is let go when its time is up.
        await until(lambda: first.let_go == 1)
        assert first.kept == {}


async def test_kv_cache_for_a_dead_decode_backend_is_let_go() -> None:
    first, dead, last = prefill(kept_s=0.1), decode(), decode()
    wanted = expected(CHAT, chat(LONG, max_tokens=8))
    async with serving([first, dead, last]) as bench:
        await dead.stop()
        for _ in range(2):
            reply = await bench.post(CHAT, chat(LONG, max_tokens=8))
            assert reply.json["choices"][0]["message"]["content"] == wanted.text
        assert last.fetched == 2
        await until(lambda: first.let_go == 1)
        assert first.kept == {}


@pytest.mark.parametrize(
    ("what", "after"),
    slow_except(
        [("die", 0), ("die", 1), ("stall", 7), ("error_event", 1), ("die_in_event", 7)],
        itertools.product(("die", "stall", "error_event", "die_in_event"), (0, 1, 7)),
    ),
)
async def test_a_decode_backend_that_dies_is_followed_by_prefill_and_decode(
    what: str, after: int
) -> None:
    first, bad, good = prefill(), decode(faults=[Fault(what, after)]), decode()
    body = chat(LONG, max_tokens=20, stream=True, stream_options={"include_usage": True})
    wanted = expected(CHAT, body)
    async with serving(
        [first, bad, good], deadlines=replace(PATIENT, first_token_s=2.0, between_tokens_s=0.3)
    ) as bench:
        reply = await bench.post(CHAT, body)
        assert reply.text == wanted.text
        (usage,) = [c["usage"] for c in reply.chunks if c.get("usage")]
        assert usage == wanted.usage
        # The prompt and the text so far were computed apart again.
        assert [len(first.seen), bad.fetched, good.fetched, good.own] == [2, 1, 1, 0]
        if after:
            assert first.seen[1].body["continue_final_message"] is True
        await bench.settled()
        (record,) = bench.records
        assert record.prompt_tokens == wanted.usage["prompt_tokens"]
        assert record.completion_tokens == wanted.usage["completion_tokens"]
        assert record.backends == ("e1", "e2")
        assert first.kept == {}


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"tool_choice": "required", "tools": [{"type": "function"}]}]
)
async def test_what_cannot_be_handed_over_is_computed_by_decode(more: Any) -> None:
    first, last = prefill(), decode()
    async with serving([first, last]) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=3, **more))
        assert reply.status == 200
        assert (len(first.seen), last.own) == (0, 1)
        assert outcomes(bench) == {"not handed over": 1}


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_room", "bootstrap_host"])
async def test_clients_cannot_name_kv_cache(name: str) -> None:
    first, last = prefill(), decode()
    async with serving([first, last]) as bench:
        reply = await bench.post(CHAT, chat("x", **{name: {"remote_block_ids": [1]}}))
        assert reply.status == 400
        assert reply.json["error"]["param"] == name
        said = chat(f'what is "{name}"?', max_tokens=2)
        assert (await bench.post(CHAT, said)).status == 200
        assert len(first.seen) == last.fetched == 1


async def test_without_a_prefill_backend_decode_answers_alone() -> None:
    first, last = prefill(), decode()
    async with serving([first, last]) as bench:
        bench.gateway.pool.set_health("e0", up=False, reason="test")
        assert (await bench.post(CHAT, chat("x", max_tokens=2))).status == 200
        bench.gateway.pool.set_health("e0", up=True)
        assert (await bench.post(CHAT, chat("x", max_tokens=2))).status == 200
        assert (last.own, last.fetched) == (1, 1)
        bench.gateway.pool.set_health("e1", up=False, reason="test")
        # Whoever computes prompts answers nobody.
        assert (await bench.post(CHAT, chat("x", max_tokens=2))).status == 503
        assert len(first.seen) == 1


async def test_a_prefill_that_goes_down_is_left_at_once() -> None:
    hung, good, last = prefill(faults=[Fault("stall_before")]), prefill(), decode()
    async with serving([hung, good, last]) as bench:
        asked = asyncio.create_task(bench.post(CHAT, chat(LONG, max_tokens=4)))
        await until(lambda: hung.running == 1)
        bench.gateway.pool.set_health("e0", up=False, reason="test")
        reply = await asked
        assert reply.headers["x-atoll-path"] == "prefill=e1 decode=e2"


async def test_a_client_that_leaves_ends_the_prompt() -> None:
    hung, last = prefill(faults=[Fault("stall_before")]), decode()
    async with serving([hung, last]) as bench:
        asked = asyncio.create_task(bench.post(CHAT, chat(LONG, max_tokens=4)))
        await until(lambda: hung.running == 1)
        asked.cancel()
        await until(lambda: hung.running == 0)
        await bench.settled()
        (record,) = bench.records
        assert record.outcome == "cancelled"
        assert len(last.seen) == 0


async def test_a_policy_holds_for_both() -> None:
    """A prompt that must stay in a region is not computed in another."""
    first, last = prefill(), decode()
    async with serving([first, last]) as bench:
        pool = bench.gateway.pool
        for name, region in (("e0", "us"), ("e1", "eu")):
            backend = pool.members[name].backend
            metadata = backend.metadata | {"region": region}
            pool.update(backend.model_copy(update={"metadata": metadata}))
        reply = await bench.post(CHAT, chat("x", max_tokens=2), "x-atoll-regions: eu\r\n")
        assert reply.status == 200
        assert (len(first.seen), last.own) == (0, 1)


async def test_only_those_that_hand_over_alike_are_paired() -> None:
    pull, push, last = prefill(), prefill(handover="nixl-push"), decode(handover="nixl-push")
    async with serving([pull, push, last]) as bench:
        for _ in range(4):
            reply = await bench.post(CHAT, chat("x", max_tokens=2))
            assert reply.headers["x-atoll-path"] == "prefill=e1 decode=e2"
        assert len(pull.seen) == 0
        assert len(push.seen) == 4


# SGLang: both at once


def sglang(phase: str, **more: Any) -> KvEngine:
    return KvEngine(kind="sglang", phase=phase, **more)


@pytest.mark.parametrize("stream", [True, False])
async def test_both_sides_meet(stream: bool) -> None:
    first, last = sglang("prefill"), sglang("decode")
    wanted = expected(CHAT, chat(LONG, max_tokens=12))
    async with serving([first, last]) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=12, stream=stream))
        said = reply.text if stream else reply.json["choices"][0]["message"]["content"]
        assert said == wanted.text
        assert reply.headers["x-atoll-path"] == "prefill=e0 decode=e1"
        (one,), (other,) = first.seen, last.seen
        fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        assert [one.body[f] for f in fields] == [other.body[f] for f in fields]
        assert one.body["stream"] is False
        await until(lambda: first.running == 0)


async def test_a_prefill_that_nobody_meets_is_replaced_with_its_number() -> None:
    bad, good, last = sglang("prefill", faults=[Fault("500")]), sglang("prefill"), sglang("decode")
    wanted = expected(CHAT, chat(LONG, max_tokens=6))
    last.step_s = 0.05
    async with serving([bad, good, last]) as bench:
        reply = await bench.post(CHAT, chat(LONG, max_tokens=6))
        assert reply.json["choices"][0]["message"]["content"] == wanted.text
        assert reply.headers["x-atoll-path"] == "prefill=e1 decode=e2"
        rooms = [seen.body["bootstrap_room"] for seen in last.seen]
        assert len(set(rooms)) == len(rooms) == 2


async def test_a_prefill_that_never_answers_is_not_waited_for_when_decode_is_done() -> None:
    first, last = sglang("prefill", faults=[Fault("stall_before")]), sglang("decode")
    async with serving([first, last]) as bench:
        assert (await bench.post(CHAT, chat(LONG, max_tokens=3))).status == 200
        await until(lambda: first.running == 0)
        assert [m.inflight for m in bench.gateway.pool.members.values()] == [0, 0]


async def test_what_sglang_cannot_hand_over_is_refused_by_name() -> None:
    first, last = sglang("prefill"), sglang("decode")
    async with serving([first, last]) as bench:
        reply = await bench.post(CHAT, chat("x", n=2))
        assert reply.status == 400
        assert "n > 1" in reply.json["error"]["message"]
        assert not first.seen
        assert not last.seen


# Processes


@pytest.mark.slow
def test_streams_survive_a_killed_decode_process_and_a_killed_prefill_process(fleet: Fleet) -> None:
    backends = []
    for number, phase in enumerate(("prefill", "prefill", "decode", "decode")):
        command = [sys.executable, "-m", "tests.runtime.gateway.kv_engine", "--phase", phase]
        command += ["--name", f"e{number}", "--step-ms", "10"]
        started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        fleet.engines.append(started)
        assert started.stdout is not None
        said = json.loads(started.stdout.readline())
        fleet.urls.append(said["url"])
        backends.append({"id": f"e{number}", "models": ["m"], "kind": "vllm", **said})
    fleet.settings = {"health": {"enabled": False}}
    fleet.write_config = lambda kind="vllm": (fleet.folder / "gateway.json").write_text(  # type: ignore[method-assign,assignment]
        json.dumps(fleet.settings | {"port": fleet.port, "backends": backends})
    )
    fleet.start()
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="x", max_retries=0, timeout=120) as sdk:
        for number, killed in enumerate((2, 0)):
            said = ""
            for count, chunk in enumerate(
                sdk.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": LONG}],
                    temperature=0,
                    max_tokens=40,
                    stream=True,
                )
            ):
                said += "".join(c.delta.content or "" for c in chunk.choices)
                if count == 5:
                    os.kill(fleet.engines[killed].pid, signal.SIGKILL)
                    fleet.engines[killed].wait()
            assert said == expected(CHAT, chat(LONG, max_tokens=40)).text, number
        # With what is left answers still come over a pair.
        answer = sdk.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "x"}], max_tokens=3
        )
        assert answer.headers["x-atoll-path"] == "prefill=e1 decode=e3"
