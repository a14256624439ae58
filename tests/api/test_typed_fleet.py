"""Fleets built of typed objects: the same as those of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import (
    CloudSpec,
    ClusterSpec,
    EngineSpec,
    Fleet,
    GridSpec,
    ImagesSpec,
    LengthsSpec,
    LimitsSpec,
    LinkSpec,
    MachinesSpec,
    ObjectiveSpec,
    OfferSpec,
    OwnedSpec,
    PoolSpec,
    RequestClassSpec,
    RiskSpec,
    ServiceSpec,
    SettingsSpec,
    VariantSpec,
)
from atoll.core.errors import InputError

RENTED = """
name: rented
services:
  chat:
    model: llama-3.1-8b
    ttft: 1600ms
    tpot: 60ms
    rate: 600/min
    lengths: {input: 600, output: 120, input_cv: 0.5}
    attainment: 95%
    engine: {max_num_seqs: 64}
  draft:
    models: [{model: llama-3.1-8b, error: 6%}, {model: llama-3.2-1b, error: 9%, min_share: 10%}]
    max_error: 8%
    ttft: 2s
    tpot: 100ms
    rate: 1/s
    lengths: 512x128
pool:
  cloud: {regions: [aws/us-east-2], gpus: [L4], spot: true, available: {L4: 3, default: 1}}
  owned: {basement: {"L40S:2": {count: 4, usd_per_hour: $0.5/h}, "L4:1": 2}}
  offers: [{region: lab, node_type: "A10G:1", available: 3, usd_per_hour: $1/h}]
limits: {budget: $100/h, spot_share: 50%}
settings: {max_nodes_per_instance: 2}
objective: {cost: 1, carbon: $100/t}
grid: {aws/us-east-2: 400 g/kWh, default: 300 g/kWh, pue: 1.2}
risk: {demand: {chat: 30%}}
catalog: {gpus: {L4: {memory: 20GB}}}
share_instances: true
"""


def test_typed_objects_make_the_fleet_of_the_file() -> None:
    fleet = Fleet.of(
        "rented",
        {
            "chat": ServiceSpec(
                model="llama-3.1-8b",
                ttft=1.6,
                tpot=0.06,
                rate=10.0,
                lengths=LengthsSpec(input=600, output=120, input_cv=0.5),
                attainment=0.95,
                engine=EngineSpec(max_num_seqs=64),
            ),
            "draft": ServiceSpec(
                models=[
                    VariantSpec(model="llama-3.1-8b", error=0.06),
                    VariantSpec(model="llama-3.2-1b", error=0.09, min_share=0.1),
                ],
                max_error=0.08,
                ttft=2.0,
                tpot=0.1,
                rate=1.0,
                lengths="512x128",
            ),
        },
        pool=PoolSpec(
            cloud=CloudSpec(
                regions=["aws/us-east-2"], gpus=["L4"], spot=True, available={"L4": 3, "default": 1}
            ),
            owned={"basement": {"L40S:2": OwnedSpec(count=4, usd_per_hour=0.5), "L4:1": 2}},
            offers=[OfferSpec(region="lab", node_type="A10G:1", available=3, usd_per_hour=1.0)],
        ),
        limits=LimitsSpec(budget=100.0, spot_share=0.5),
        settings=SettingsSpec(max_nodes_per_instance=2),
        objective=ObjectiveSpec(cost=1.0, carbon=100.0),
        grid=GridSpec.parse({"aws/us-east-2": 400.0, "default": 300.0, "pue": 1.2}),
        risk=RiskSpec(demand={"chat": 0.3}),
        catalog={"gpus": {"L4": {"memory": "20GB"}}},
        share_instances=True,
    )
    assert fleet.problem == Fleet.read(RENTED).problem


def test_clusters_and_classes_too() -> None:
    chat = ServiceSpec(model="llama-3.1-8b", ttft=5.0, tpot=0.5, rate=1.0, lengths="512x128")
    placed = Fleet.of(
        "placed",
        {"chat": chat},
        cluster=ClusterSpec(
            nodes={"lab": {"L4:1": 2, "T4:1": ["a", "b"], "A10G:1": MachinesSpec(count=1)}},
            links=[LinkSpec(between=["*", "*"], bandwidth=1.25e9, latency=0.001)],
        ),
    )
    text = """
name: placed
services: {chat: {model: llama-3.1-8b, ttft: 5s, tpot: 500ms, rate: 1/s, lengths: 512x128}}
cluster:
  nodes: {lab: {"L4:1": 2, "T4:1": [a, b], "A10G:1": {count: 1}}}
  links: [{between: ["*", "*"], bandwidth: 10Gbit/s, latency: 1ms}]
"""
    assert placed.problem == Fleet.read(text).problem
    classes = {"image+text": RequestClassSpec(share=1.0, images=ImagesSpec(count=2.0))}
    seeing = Fleet.of(
        "seeing",
        {"see": ServiceSpec(model="qwen2.5-vl-7b", rate=1.0, classes=classes)},
        pool=PoolSpec(owned={"lab": {"L40S:1": 4}}),
    )
    assert [each.name for each in seeing.classes["see"]] == ["image+text"]


def test_text_with_units_is_read_as_in_a_file() -> None:
    spec = {"model": "llama-3.1-8b", "ttft": "1600ms", "tpot": "60ms", "rate": "10/s"}
    fleet = Fleet.of(
        "text",
        {"chat": ServiceSpec.parse({**spec, "lengths": "512x128"})},
        pool=PoolSpec(owned={"lab": {"L4:1": 2}}),
    )
    assert fleet.problem.services[0].ttft_s == 1.6


def test_mistakes_name_the_field() -> None:
    chat = ServiceSpec(model="llama-9", ttft=1.0, tpot=0.1, rate=1.0, lengths="512x128")
    pool = PoolSpec(owned={"lab": {"L4:1": 2}})
    with pytest.raises(InputError, match=r"services\.chat\.model: unknown model"):
        Fleet.of("wrong", {"chat": chat}, pool=pool)
    with pytest.raises(InputError, match="services: at least 1 needed"):
        Fleet.of("empty", {}, pool=pool)
    with pytest.raises(InputError, match="pool"):
        Fleet.of("homeless", {"chat": chat.model_copy(update={"model": "llama-3.1-8b"})})


def test_a_typed_fleet_is_planned(tmp_path: Path) -> None:
    chat = ServiceSpec(model="llama-3.1-8b", ttft=2.0, tpot=0.1, rate=1.0, lengths="512x128")
    fleet = Fleet.of("typed", {"chat": chat}, pool=PoolSpec(owned={"lab": {"L4:1": 4}}))
    plan = fleet.plan(capacity_only=True)
    plan.validate()
    plan.save(tmp_path / "plan.json")
    assert fleet.load_plan(tmp_path / "plan.json") == plan
