"""Plans served on this machine from Python, by a small model that stands in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from atoll import Fleet, PoolSpec, ServedPlan, ServeOptions, ServiceSpec
from atoll.core.errors import UnknownNameError, UsageError
from atoll.runtime.http.http_client import FetchError, request


@pytest.fixture
def fleet() -> Fleet:
    chat = ServiceSpec(
        model="llama-3.1-8b", ttft=2.0, tpot=0.1, rate=0.5, lengths="512x128", phases="together"
    )
    return Fleet.of("small", {"chat": chat}, pool=PoolSpec(owned={"here": {"L40S:1": 1}}))


def ask(served: ServedPlan) -> str:
    chat = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"{served.url}/v1/chat/completions"
    answer = asyncio.run(request(url, body=chat, timeout_s=60.0))
    assert answer.status == 200
    assert "x-atoll-stand-in" in {name.lower() for name in answer.headers}
    return str(json.loads(answer.body)["choices"][0]["message"]["content"])


@pytest.mark.engine
@pytest.mark.slow
def test_a_plan_answers_until_it_is_stopped(fleet: Fleet, tmp_path: Path) -> None:
    plan = fleet.plan(capacity_only=True)
    options = ServeOptions(stand_in=True, port=0, log=tmp_path / "gateway.log")
    with plan.serve(options) as served:
        assert ask(served)
        assert [endpoint.service for endpoint in served.state.endpoints] == ["chat"]
    with pytest.raises(FetchError):
        ask(served)
    served.stop()  # a second time does nothing


def test_what_cannot_be_served_is_said_before_anything_starts(fleet: Fleet) -> None:
    plan = fleet.plan(capacity_only=True)
    with pytest.raises(UnknownNameError, match="engine"):
        plan.serve(ServeOptions(engine="nobody", stand_in=True, port=0))
    with pytest.raises(UnknownNameError, match="model"):
        plan.serve(ServeOptions(only=("nobody",), stand_in=True, port=0))
    with pytest.raises(UsageError, match="stand-in is not offered"):
        plan.serve(ServeOptions(fabric="open://127.0.0.1:1", stand_in=True, port=0))
