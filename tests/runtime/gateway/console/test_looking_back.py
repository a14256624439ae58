"""History and the last requests of a real gateway, asked over HTTP."""

from __future__ import annotations

import json
import time
from pathlib import Path

from atoll.telemetry.history import ModelSums
from tests.runtime.gateway.console.site import Site, open_site

CHAT = "/v1/chat/completions"


async def ask_model(site: Site, name: str, request_id: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n{site.headers(name)}"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = await site.place.bench.ask(head.encode() + body)
    assert answer.status == 200


async def test_a_request_is_found_by_its_id_and_only_by_who_may_see_it(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await ask_model(site, "member", "asked-1")
        await ask_model(site, "other", "asked-2")
        seen = (await site.ask("viewer", "GET", "requests")).json["requests"]
        assert [one["id"] for one in seen] == ["asked-2", "asked-1"]
        own = (await site.ask("member", "GET", "requests")).json["requests"]
        assert [one["id"] for one in own] == ["asked-1"]
        assert (await site.ask("member", "GET", "requests/asked-2")).status == 404
        found = (await site.ask("socket", "GET", "requests/asked-1")).json
        assert found["outcome"] == "ok"
        kinds = [span["kind"] for span in found["spans"]]
        assert kinds[0] == "gateway"
        assert "attempt" in kinds
        # Nothing of what was said is kept.
        assert "hi" not in json.dumps(found).split('"')


async def test_history_is_told_as_curves(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        gateway = site.place.bench.gateway
        await ask_model(site, "member", "asked-1")
        history = gateway.history
        now_s = time.time()
        # What a step of ten seconds would have written.
        history._write(now_s, {"m": ModelSums(10.0, 5.0)}, {}, ["machine a joined"])
        path = f"history?since_s={now_s - 600}&until_s={now_s + 60}&points=20"
        found = (await site.ask("viewer", "GET", path)).json
        assert [one["name"] for one in found["series"]] == ["m"]
        assert 0.5 in found["series"][0]["requests_per_s"]
        assert len(found["at_s"]) <= 22
        assert [change["text"] for change in found["changes"]] == ["machine a joined"]
        for wrong in ("of=gpus", "points=0", "since_s=x", "since_s=9&until_s=5"):
            assert (await site.ask("viewer", "GET", f"history?{wrong}")).status == 400


async def test_a_gateway_that_keeps_no_history_says_so(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        gateway = site.place.bench.gateway
        gateway.configure(gateway.settings.model_copy(update={"history": ""}))
        answer = await site.ask("viewer", "GET", "history")
        assert answer.status == 404
        assert answer.json["error"]["code"] == "no_history"


async def test_what_is_counted_is_recorded_once(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        gateway = site.place.bench.gateway
        await ask_model(site, "member", "asked-1")
        now_s = gateway.loop.time()
        first = gateway.traffic.take(now_s + 20.0)
        assert first["m"][0] == 1.0
        assert gateway.traffic.take(now_s + 40.0)["m"][0] == 0.0
