"""The last step of `atoll demo`, with a tiny model instead of a small one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.api.demo.controlled_fleet import DemoFleet, operate_here
from atoll.runtime.local.local_endpoints import LocalModel


def test_as_many_instances_are_planned_as_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    fleet = DemoFleet("tiny", LocalModel("tiny", tmp_path), tmp_path)
    for rate_per_s, count in ((0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2)):
        plan = fleet._plan(fleet._ask(rate_per_s))
        assert len(plan.instances) == count
        assert sum(route.share for route in plan.routes) == pytest.approx(1.0)
        assert {node.end for one in plan.instances for node in one.nodes} == {4}


@pytest.mark.engine
@pytest.mark.slow
def test_a_replica_comes_when_twice_as_much_is_asked(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from benchmarks.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    told: list[str] = []

    async def show() -> str:
        async with operate_here("tiny", LocalModel("tiny", folder), home) as fleet:
            await fleet.settle(1, told.append)
            fleet.ask_for(2.0)
            await fleet.settle(2, told.append)
            return fleet.describe_shares()

    shares = asyncio.run(show())
    assert shares.startswith("requests so far: 0 to tiny-0-")
    assert [line.rpartition(": ")[0] for line in told] == [
        "no plan is known yet",
        "what the fleet asks for has changed",
    ]
