"""A graph server of a fleet: which executors it asks, and what it answers for, as both change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from atoll.core.errors import InputError, UsageError
from atoll.deploy.commands.executor_node import (
    TOKEN_VARIABLE,
    ExecutorOffer,
    make_config,
    offer_executor,
)
from atoll.deploy.commands.graph_node import FleetFollower, list_executors
from atoll.deploy.commands.meeting import FolderMeeting, MemberAddress, PoolMember, PoolWord
from atoll.runtime.graph_server.graph_config import (
    ExecutorAddress,
    GraphServerConfig,
    GraphService,
)

POOL = "lab.executors"
TASKS = {"chat": "atoll.tasks.library.assistant:SpeakingAssistant"}


def member(name: str, port: int, host: str = "10.0.0.7") -> PoolMember:
    text = ExecutorOffer(id=name, runs=("smollm2",)).to_json()
    return PoolMember("n0", text, MemberAddress(host=host, ports=(port, port + 1)))


def test_executors_of_a_pool_are_listed_by_name() -> None:
    found = list_executors(
        [
            member("think-1", 4000),
            member("think-0", 4100),
            member("think-1", 4200, "::1"),
            PoolMember("n0", "not an offer", MemberAddress(host="x", ports=(1, 2))),
        ]
    )
    # Started anew, it is where it said last.
    assert [(each.id, each.address) for each in found] == [
        ("think-0", "10.0.0.7:4100"),
        ("think-1", "[::1]:4200"),
    ]


def test_components_must_fit_into_a_label() -> None:
    assert offer_executor("e", {"a": {}, "b": {}}).runs == ("a", "b")
    with pytest.raises(InputError, match="too many components"):
        offer_executor("e", {f"component-{number}": {} for number in range(40)})


def test_an_executor_listens_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=TOKEN_VARIABLE):
        make_config("e", {"a": {}}, "10.0.0.7:1", 2, tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, "@/keys/token")
    config = make_config("e", {"a": {"x": 1}}, "10.0.0.7:1", 2, tmp_path, device="cuda")
    assert (config.address, config.health_host, config.health_port) == (
        "10.0.0.7:1",
        "127.0.0.1",
        2,
    )
    assert (config.token_file, config.device, config.components) == (
        "/keys/token",
        "cuda:0",
        {"a": {"x": 1}},
    )


class Server:
    """Notes what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[str], Mapping[str, str]]] = []

    def change(
        self, services: Sequence[GraphService], executors: Sequence[ExecutorAddress]
    ) -> None:
        names = [service.name for service in services]
        self.told.append((names, {each.id: each.address for each in executors}))


def write(path: Path, *names: str) -> None:
    config = GraphServerConfig(
        name="graph-server",
        port=0,
        services=tuple(GraphService(name=name, tasks=TASKS) for name in names),
        store=".",
        token_file="t",
    )
    # Another file under the same name, as whoever operates a fleet writes it.
    fresh = path.with_suffix(".new")
    fresh.write_text(config.to_json())
    fresh.replace(path)


async def test_a_server_is_told_what_changes_and_nothing_twice(tmp_path: Path) -> None:
    path, server = tmp_path / "graph.json", Server()
    write(path, "look")
    executor = FolderMeeting(tmp_path / "meeting", "lab.think-0")
    offer = offer_executor("think-0", {"smollm2": {}})
    follower = FleetFollower(server, FolderMeeting(tmp_path / "meeting", "lab.graph"), POOL, path)
    await follower.look()
    await follower.look()
    assert server.told == [(["look"], {})]
    address = MemberAddress(host="10.0.0.7", ports=(4000, 4001))
    await executor.enter("n0", address, PoolWord(POOL, offer.to_json()))
    await follower.look()
    assert server.told[1:] == [(["look"], {"think-0": "10.0.0.7:4000"})]
    # Half a file changes nothing; the next whole one does.
    path.write_text(json.dumps({"name": "graph-server"}))
    await follower.look()
    assert len(server.told) == 2
    write(path, "hear", "look")
    await executor.withdraw()
    await follower.look()
    assert server.told[2:] == [(["hear", "look"], {})]
