"""Machines, pipelines and models as people see them."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from atoll.runtime.gateway.console.shown_machines import (
    ShownMachine,
    count_machines,
    find_pipelines,
    list_machines,
)
from atoll.runtime.gateway.console.shown_models import list_models
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.backend_metadata import (
    MODALITIES,
    STAGES,
    BackendStage,
    read_modalities,
    read_stages,
    write_modalities,
    write_stages,
)
from atoll.runtime.pool.member import Backend, Facts
from atoll.runtime.pool.policy import ModelOffer
from atoll.runtime.pool.routes import ChoiceRoutes
from tests.runtime.gateway.console.viewing import Nodes, View, node, service

DOCUMENTED = {
    "id name role provider verified region site gpus cpus memory_bytes services load state reason since_s",
    "ends_s usd_per_hour engine stability requests failures instance fleet drained can_drain",
}


def offer(name: str) -> ModelOffer:
    return ModelOffer(
        node=name, sid="s-1", provider="ETH", region="eu-west-1", precision="fp8", context=32768
    )


def test_node_of_a_fabric() -> None:
    load = {"running": 3, "waiting": 1, "capacity": 64, "kv_used": 0.4, "gpu_used": 0.8}
    labels = {"atoll.instance": "chat-1", "atoll.fleet": "lab"}
    fabric = Nodes(
        [node("s-1", "lab/gpu1", load=load, labels=labels, price_usd_per_hour=3.1, ends_s=2e9)],
        [node("h-1", "hub", role="hub", services=[])],
    )
    view = View(federation=fabric)
    backend = Backend(id="s-1", url="fabric://s-1", models=("m",))
    member = view.pool.add(backend, Facts({"m": offer("lab/gpu1")}))
    member.requests, member.failures = 12, 2
    shown, hub = list_machines(view)
    plain = json.loads(msgspec.json.encode(shown))
    assert set(" ".join(DOCUMENTED).split()) <= plain.keys()
    assert plain["gpus"] == [{"type": "A100", "count": 2, "memory_bytes": 85899345920}]
    assert plain["services"] == [
        {"model": "m", "layers": None, "precision": "fp8", "context": 32768}
    ]
    assert plain["load"] == {
        "running": 3,
        "waiting": 1,
        "capacity": 64,
        "kv_share": 0.4,
        "gpu_share": 0.8,
        "memory_share": None,
    }
    assert (shown.id, shown.name, shown.role, shown.state) == ("s-1", "lab/gpu1", "node", "up")
    assert (shown.provider, shown.verified, shown.engine) == ("ETH", True, "vllm 0.32")
    assert (shown.requests, shown.failures, shown.usd_per_hour) == (12, 2, 3.1)
    assert (shown.instance, shown.fleet, shown.can_drain) == ("chat-1", "lab", True)
    assert shown.since_s == pytest.approx(time.time() - 10.0, abs=60)
    assert (hub.role, hub.can_drain) == ("hub", False)


def test_backend_of_a_file_says_what_its_metadata_say() -> None:
    view = View()
    view.add(
        "b",
        "m",
        kind="vllm",
        max_inflight=8,
        metadata={"gpus": "2xA100,L4,L4", "region": "eu", "context": "4096", "api_key": "secret"},
    )
    (shown,) = list_machines(view)
    assert [(g.type, g.count) for g in shown.gpus] == [("A100", 2), ("L4", 2)]
    assert (shown.role, shown.engine, shown.load.capacity) == ("backend", "vllm", 8)
    assert (shown.provider, shown.verified, shown.services[0].context) == (None, False, 4096)
    assert "secret" not in str(msgspec.to_builtins(shown))


@pytest.mark.parametrize(
    ("more", "state", "reason"),
    [
        ({}, "up", ""),
        ({"unused_because": "it does not take requests of ours"}, "up", "it does not take"),
        ({"alive": False}, "down", "its token is gone"),
        ({"state": "join"}, "starting", ""),
        ({"state": "left"}, "left", ""),
    ],
)
def test_nodes_that_get_no_requests(more: dict[str, object], state: str, reason: str) -> None:
    view = View(federation=Nodes([node("s-1", "gpu1", **more), node("g", "gw", role="gateway")]))
    (shown,) = list_machines(view)
    assert (shown.state, shown.can_drain) == (state, False)
    assert shown.reason.startswith(reason)


def test_drained_machine_drains_until_nothing_runs() -> None:
    view = View()
    member = view.add("b", "m")
    member.inflight = 1
    view.pool.drain("b")
    assert list_machines(view)[0].state == "draining"
    member.inflight = 0
    assert (list_machines(view)[0].state, list_machines(view)[0].drained) == ("drained", True)


def test_pipelines_of_nodes_with_parts_of_a_model() -> None:
    def part(sid: str, begin: int, end: int, instance: str = "chat-1") -> dict[str, object]:
        labels = {"atoll.instance": instance, "atoll.fleet": "lab"} if instance else {}
        return node(sid, sid, services=[service("m", [begin, end])], labels=labels)

    view = View(
        federation=Nodes(
            [
                part("s2", 40, 64),
                part("s1", 0, 40),
                part("s3", 0, 64, "chat-2"),
                part("s4", 0, 1, ""),
            ]
        )
    )
    first, second = find_pipelines(list_machines(view))
    assert (first.model, first.instance, first.layers) == ("m", "chat-1", 64)
    assert [(s.machine, s.layers) for s in first.stages] == [("s1", (0, 40)), ("s2", (40, 64))]
    assert (second.instance, len(second.stages)) == ("chat-2", 1)


def test_pipelines_of_a_fleet_on_this_machine() -> None:
    stages = [
        BackendStage("chat-1/n1", "chat-1", (6, 12), cores=2, planned="L4"),
        BackendStage("chat-1/n0", "chat-1", (0, 6), cores=1, planned="A100"),
    ]
    view = View()
    view.add(
        "chat-1", "m", kind="atoll", metadata={STAGES: write_stages(stages), "precision": "fp32"}
    )
    machines = list_machines(view)
    assert [(m.id, m.role, m.can_drain) for m in machines] == [
        ("chat-1", "backend", True),
        ("chat-1/n1", "node", False),
        ("chat-1/n0", "node", False),
    ]
    # A type that was planned is no GPU of this machine.
    assert (machines[1].gpus, machines[1].planned, machines[1].cpus) == ((), "L4", 2)
    assert machines[1].services[0].precision == "fp32"
    (pipeline,) = find_pipelines(machines)
    assert [s.machine for s in pipeline.stages] == ["chat-1/n0", "chat-1/n1"]
    page = json.loads(GatewaySnapshots(view).machines())
    assert page["pipelines"][0]["stages"][0] == {"machine": "chat-1/n0", "layers": [0, 6]}


@pytest.mark.parametrize(
    "text", ["", "x", "[1]", "{}", '[{"name":""}]', "[" * 10_000, "x" * 300_000]
)
def test_what_is_no_stage_is_left_out(text: str) -> None:
    assert read_stages(text) == ()
    assert read_modalities(text) == {}


def test_models_with_offers_aliases_and_choices() -> None:
    choices = {"chat": ChoiceRoutes(shares={"small": 0.7, "large": 0.3})}
    settings = GatewaySettings(aliases={"mini": "small"}, choices=choices)
    view = View(settings=settings)
    known = write_modalities({"small": (("text", "image"), ("text",))})
    member = view.add(
        "b", "small", metadata={"gpus": "2xA100", "usd_per_hour": "3", MODALITIES: known}
    )
    view.add("c", "large", aliases={"big": "large"}, metadata={"stand_in": "tiny"})
    member.requests, member.mean_s, member.first_s = 3, 2.2, 0.4
    shown = {m.name: m for m in list_models(view, list_machines(view), view.clock.now_s)}
    assert list(shown) == ["chat", "small", "large"]
    assert shown["chat"].choice == {"shares": {"small": 0.7, "large": 0.3}}
    small, large = shown["small"], shown["large"]
    assert (small.aliases, large.aliases) == (("mini",), ("big",))
    assert (small.takes, small.makes) == (("text", "image"), ("text",))
    assert (large.takes, large.makes, large.stand_in) == (("text",), ("text",), "tiny")
    (offered,) = small.offers
    assert (offered.machine, offered.gpus, offered.usd_per_hour) == ("b", "2xA100", 3.0)
    assert (offered.mean_s, offered.first_token_s) == (2.2, 0.4)
    assert large.offers[0].mean_s is None  # nobody asked it yet


def test_an_instance_of_listed_machines_is_none_itself() -> None:
    def machine(name: str, role: str, state: str = "up", **more: Any) -> ShownMachine:
        return ShownMachine(id=name, name=name, role=role, state=state, **more)

    staged = [machine(f"n{n}", "node", instance="chat-1", fleet="lab") for n in range(4)]
    instance = machine("chat-1", "backend", instance="chat-1", fleet="lab", can_drain=True)
    assert count_machines([instance, *staged]) == (4, 4)
    others = [
        machine("alone", "backend", "down", instance="chat-2", fleet="lab", can_drain=True),
        machine("gone", "node", "left"),
        machine("hub", "hub"),
    ]
    assert count_machines([instance, *staged, *others]) == (4, 5)
