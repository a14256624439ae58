from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from atoll.cli import main as cli
from atoll.cli.console_client import ConsoleClient
from atoll.fabric.identity.access import Access
from atoll.fabric.registry.peers import Load, Peer
from atoll.fabric.registry.records import Metadata, as_dict
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.link import UnreachableError
from tests.fabric.registry.test_queries import peer

Captured = pytest.CaptureFixture[str]


class FakeFabric:
    """A fabric with two nodes; records how it was joined and left."""

    def __init__(self) -> None:
        later_s = time.time() + 3600.5
        self.found = (
            peer(ends_s=later_s, price_usd_per_hour=2.5, engine_version="0.9"),
            peer(name="\N{SNOWMAN}[b]", alive=False, services=()),
        )
        self.loads = {self.found[0].sid: Load(running=3, waiting=1, capacity=8)}
        self.observed: bool | None = None
        self.closed = False
        self.connected = True

    async def connect(self, access: Access, metadata: Metadata, *, observe: bool) -> FakeFabric:
        self.observed = observe
        return self

    def peers(self) -> tuple[Peer, ...]:
        return self.found

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> FakeFabric:
    fake = FakeFabric()
    monkeypatch.setattr(Fabric, "connect", fake.connect)
    monkeypatch.setenv("ATOLL_FABRIC", "open://127.0.0.1:1")
    return fake


def test_the_table_shows_what_matters(fabric: FakeFabric, capsys: Captured) -> None:
    assert cli.run(["nodes"]) == 0
    shown = capsys.readouterr().out
    for text in ("lab/gpu1", "Uni ✓", "eu-west-1/hall", "2xA100-80G 85GB", "3/8 +1", "$2.50/h"):
        assert text in shown
    assert "meta/llama-70b bf16, qwen3-8b fp8" in shown
    assert "\N{SNOWMAN}[b]" in shown
    assert "silent" in shown
    assert "2 nodes" in shown
    assert fabric.observed is True
    assert fabric.closed


def test_options_narrow_and_json_tells_all(fabric: FakeFabric, capsys: Captured) -> None:
    asked = ["nodes", "--gpu", "A100", "--min-vram", "40GB", "--model", "llama", "--json"]
    assert cli.run(asked) == 0
    (node,) = json.loads(capsys.readouterr().out)
    assert (node["name"], node["state"], node["routable"]) == ("lab/gpu1", "serving", True)
    assert node["load"]["running"] == 3
    assert node["hardware"]["gpus"][0] == {
        "type": "A100-80G",
        "count": 2,
        "memory_bytes": 85 * 10**9,
    }
    assert "revoked" not in node


def test_nobody_has_it(fabric: FakeFabric, capsys: Captured) -> None:
    assert cli.run(["nodes", "--gpu", "B200"]) == 0
    assert capsys.readouterr().out.strip() == "none of 2 nodes"
    assert cli.run(["nodes", "--gpu", "B200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_slips_are_named(fabric: FakeFabric, capsys: Captured) -> None:
    assert cli.run(["nodes", "--state", "servin"]) != 0
    error = capsys.readouterr().err
    assert "did you mean serving" in error
    assert error.count("\n") == 1


def test_no_hub_says_where_it_looked(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    async def unreachable(access: Access, *_: object, **__: object) -> Fabric:
        raise UnreachableError(f"no hub answers at {', '.join(access.hubs)}")

    monkeypatch.setattr(Fabric, "connect", unreachable)
    assert cli.run(["nodes"]) == 1
    assert capsys.readouterr().err == "error: no hub answers at 127.0.0.1:1\n"


def test_a_dashboard_elsewhere_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    one = peer(price_usd_per_hour=2.5)
    shown = as_dict(one.metadata) | {
        "sid": one.sid,
        "state": one.state.name.lower(),
        "alive": True,
        "verified": True,
        "for_s": 5.0,
        "load": msgspec.structs.asdict(Load(running=3, waiting=1, capacity=8)),
        "used": True,
        "unused_because": None,
        "direct_used": False,
    }
    asked: list[str] = []

    def ask(client: ConsoleClient, method: str, path: str, body: object = None) -> object:
        asked.append(f"{client.url} {method} {path}")
        return {"nodes": [shown, {**shown, "name": "other", "sid": "o"}], "hubs": []}

    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    monkeypatch.setenv("ATOLL_KEY", "atoll-k")
    monkeypatch.setattr(ConsoleClient, "ask", ask)
    words = ["nodes", one.name, "--console", "http://far:1"]
    assert cli.run(words) == 0
    assert asked == ["http://far:1 GET /atoll/v1/fabric"]
    table = capsys.readouterr().out
    for text in (one.name, "3/8 +1", "$2.50/h", "1 of 2 nodes"):
        assert text in table
    assert cli.run([*words, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["sid"], said["load"]["running"]) == (one.sid, 3)
    assert cli.run([*words, "--watch"]) == 2
    assert "--watch" in capsys.readouterr().err


def test_status_points_to_nodes_where_no_plan_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.run(["status"]) == 0
    assert "`atoll nodes`" in capsys.readouterr().out
