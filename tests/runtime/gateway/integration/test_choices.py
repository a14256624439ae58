"""A gateway with a choice between models: shares, conversations, and who answers where one is gone."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from atoll.runtime.pool.routes import ChoiceRoutes
from atoll.telemetry.logs import JsonLog
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import CHAT, Bench, Reply, chat, running

ROUTES = ChoiceRoutes(
    shares={"chat.small": 0.75, "chat.large": 0.25},
    errors={"chat.small": 0.06, "chat.large": 0.01},
    models={"chat.small": "llama-3.1-8b", "chat.large": "llama-3.1-70b@fp8"},
)
STICKY = ROUTES.model_copy(update={"sticky": True})
TRAFFIC = "/atoll/v1/traffic"


def choosing(
    *, routes: ChoiceRoutes | None = ROUTES, **more: Any
) -> AbstractAsyncContextManager[Bench]:
    """Run a gateway over a small model and a large one."""
    engines = [ScriptedEngine(model="chat.small"), ScriptedEngine(model="chat.large")]
    return running(engines, choices={} if routes is None else {"chat": routes}, **more)


async def ask(bench: Bench, text: str = "hello", headers: str = "", **more: Any) -> Reply:
    body = {"model": "chat", "max_tokens": 2} | more
    return await bench.post(CHAT, chat(text, **body), headers)


async def answered(bench: Bench, count: int, **more: Any) -> Counter[str]:
    replies = [await ask(bench, **more) for _ in range(count)]
    assert {reply.status for reply in replies} == {200}, replies
    return Counter(reply.headers["x-atoll-model"] for reply in replies)


async def test_requests_are_dealt_by_share_and_answers_say_by_whom() -> None:
    async with choosing() as bench:
        for _ in range(3):
            assert await answered(bench, 8) == {"llama-3.1-8b": 6, "llama-3.1-70b@fp8": 2}
        assert {seen.body["model"] for seen in bench.engines[0].seen} == {"chat.small"}
        assert {seen.body["model"] for seen in bench.engines[1].seen} == {"chat.large"}
        reply = await ask(bench, stream=True)
        assert reply.headers["x-atoll-model"] == "llama-3.1-8b"
        assert reply.chunks
        # What was asked for is written down, what it took is counted for a controller.
        await bench.settled()
        assert {record.model for record in bench.records} == {"chat"}
        models = (await bench.admin(TRAFFIC)).json["models"]
        assert {n: m["minute"]["arrivals"] for n, m in models.items()} == {
            "chat.small": 19,
            "chat.large": 6,
        }
        page = (await bench.admin("/metrics")).body.decode()
        assert 'atoll_choice_requests_total{choice="chat",model="llama-3.1-8b"} 19.0' in page
        assert 'atoll_gateway_requests_total{endpoint="/v1/chat/completions",model="chat"' in page
        assert "atoll_choice_stand_ins_total{" not in page


async def test_the_choice_is_listed_and_what_is_behind_it_answers_too() -> None:
    async with choosing() as bench:
        listed = (await bench.get("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["chat"]
        assert (await bench.get("/v1/models/chat")).json["id"] == "chat"
        assert (await bench.get("/v1/models/chat.large")).status == 200
        for _ in range(3):
            reply = await bench.post(CHAT, chat(model="chat.large", max_tokens=2))
            assert reply.status == 200
        assert len(bench.engines[1].seen) == 3


async def test_a_choice_may_have_another_name_and_stand_in_for_others() -> None:
    async with choosing(aliases={"gpt": "chat"}) as bench:
        listed = (await bench.get("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["chat", "gpt"]
        replies = [await ask(bench, model="gpt") for _ in range(8)]
        assert Counter(reply.headers["x-atoll-model"] for reply in replies) == {
            "llama-3.1-8b": 6,
            "llama-3.1-70b@fp8": 2,
        }
        instead = await ask(bench, model="unknown", models=["chat"])
        assert instead.status == 200
        await bench.settled()
        assert {record.model for record in bench.records[:8]} == {"chat"}


async def test_the_log_says_who_answered(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        async with choosing() as bench:
            bench.gateway.log = JsonLog(descriptor)
            bench.gateway.configure(bench.gateway.settings)
            await ask(bench)
            await ask(bench, model="chat.large")
            await bench.settled()
            bench.gateway.log.flush()
    finally:
        os.close(descriptor)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    said = [(e["model"], e.get("answered")) for e in lines if e["event"] == "request"]
    assert said == [("chat", "llama-3.1-8b"), ("chat.large", None)]


async def test_models_that_clients_know_by_name_stay_listed() -> None:
    async with choosing(routes=ROUTES.model_copy(update={"models": {}})) as bench:
        listed = (await bench.get("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["chat", "chat.small", "chat.large"]
        reply = await ask(bench)
        assert reply.headers["x-atoll-model"] == "chat.small"


async def test_a_conversation_stays_with_its_model() -> None:
    async with choosing(routes=STICKY) as bench:
        found: dict[str, set[str]] = {}
        for _ in range(3):
            for number in range(16):
                reply = await ask(bench, f"question {number}")
                found.setdefault(f"text {number}", set()).add(reply.headers["x-atoll-model"])
                header = f"x-atoll-session: {number}\r\n"
                reply = await ask(bench, "hi" * number, headers=header)
                found.setdefault(f"session {number}", set()).add(reply.headers["x-atoll-model"])
        assert {len(models) for models in found.values()} == {1}
        assert len(set.union(*found.values())) == 2
        bad = await ask(bench, headers=f"x-atoll-session: {'x' * 300}\r\n")
        assert (bad.status, bad.json["error"]["param"]) == (400, "x-atoll-session")


async def test_who_errs_less_stands_in_for_one_that_is_gone() -> None:
    async with choosing() as bench:
        bench.gateway.pool.set_health("e0", up=False, reason="test")
        assert await answered(bench, 8) == {"llama-3.1-70b@fp8": 8}
        page = (await bench.admin("/metrics")).body.decode()
        labels = 'choice="chat",instead_of="llama-3.1-8b",model="llama-3.1-70b@fp8"'
        assert f"atoll_choice_stand_ins_total{{{labels}}} 6.0" in page
        bench.gateway.pool.set_health("e0", up=True)
        assert await answered(bench, 8) == {"llama-3.1-8b": 6, "llama-3.1-70b@fp8": 2}


async def test_who_errs_more_answers_only_where_nobody_else_is() -> None:
    async with choosing(max_inflight=1) as bench:
        # The large one is busy: requests that are its turn are told so, and do not get less.
        bench.gateway.pool.members["e1"].inflight = 1
        replies = [await ask(bench) for _ in range(8)]
        models = Counter(reply.headers.get("x-atoll-model") for reply in replies)
        assert models == {"llama-3.1-8b": 6, None: 2}
        assert {r.status for r in replies} == {200, 503}
        bench.gateway.pool.members["e1"].inflight = 0
        bench.gateway.pool.set_health("e1", up=False, reason="test")
        assert await answered(bench, 8) == {"llama-3.1-8b": 8}


async def test_another_model_answers_a_request_that_one_failed() -> None:
    async with choosing() as bench:
        bench.engines[0].faults = [Fault("die_before_head")] * 3
        bench.engines[1].faults = []
        assert sum((await answered(bench, 4)).values()) == 4
        assert len(bench.engines[1].seen) == 4  # its own turn, and the three that failed


async def test_a_controller_tells_choices() -> None:
    async with choosing(routes=None) as bench:
        assert (await ask(bench)).status == 404
        told = {"fleet": "", "models": {}, "choices": {"chat": ROUTES.model_dump(mode="json")}}
        reply = await bench.admin("/atoll/v1/routes", told, method="PUT")
        assert reply.status == 200, reply.body
        assert reply.json["choices"]["chat"]["shares"] == ROUTES.shares
        assert await answered(bench, 8) == {"llama-3.1-8b": 6, "llama-3.1-70b@fp8": 2}
        bad = {"choices": {"chat": {"shares": {"chat.small": 0}}}}
        refused = await bench.admin("/atoll/v1/routes", bad, method="PUT")
        assert (refused.status, "nobody has a share" in refused.body.decode()) == (400, True)
        await bench.admin("/atoll/v1/routes", {"models": {}}, method="PUT")
        assert (await ask(bench)).status == 404
