"""KV that travels: in one region, or over a link that carries it in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.handover import handover, handover_engine, kv_bytes, transfer_s
from atoll.plan.plan import Plan, Route
from atoll.plan.problem import Problem, Settings
from atoll.plan.validate.check import Violation, validate
from atoll.solve.assembly import NewInstance, plan_from_layouts
from atoll.solve.registry import solve
from tests.plan.builders import (
    CHOSEN,
    EAST,
    LAYERS,
    WEST,
    edit,
    find,
    layout,
    offer,
    problem,
    rent,
    service,
)

ACROSS = ("chat-prefill-0", "chat-decode-0")


def joined(bandwidth: str, latency: str = "1ms", **changes: object) -> Problem:
    """The small problem with a link of its own between its two regions, and interfaces that carry more."""
    link = {"between": [EAST, WEST], "bandwidth": bandwidth, "latency": latency}
    links = {"regions": [link], "nics": {"L40S:1": "20Gbit/s"}}
    return problem(overlays=({"links": links},), **changes)


def made(asked: Problem, *chosen: NewInstance) -> Plan:
    return plan_from_layouts(asked, asked.catalog(), chosen, status="feasible", solver="by hand")


def across(*names: str) -> list[NewInstance]:
    """For each service prefill in one region and decode in the other."""
    return [
        NewInstance(f"{name}/llm/{phase}", region, layout((0, LAYERS, ("L40S:1",))), rented)
        for name in names
        for phase, region, rented in (("prefill", EAST, rent(L40S=1)), ("decode", WEST, None))
    ]


def broken(plan: Plan, asked: Problem) -> list[Violation]:
    return [v for v in validate(plan, asked) if v.rule == "handover"]


def test_phases_in_two_regions_are_paired_over_a_fast_link() -> None:
    asked = joined("100Gbit/s")
    plan = made(asked, CHOSEN[0], CHOSEN[2], CHOSEN[3])
    assert plan.served_fraction == {"chat": 1.0, "mini": 1.0}
    assert [r.instances for r in plan.routes if r.service == "chat"] == [ACROSS]
    assert validate(plan, asked) == []


@pytest.mark.parametrize("share", [0.5, 1.0 + 1e-9])
def test_a_link_is_used_for_what_is_missing_only(share: float) -> None:
    """Nor for what is rounding: a region that carries all but a billionth needs no other."""
    asked = joined("100Gbit/s")
    here = made(asked, *CHOSEN[:2])
    tokens = {"chat-prefill-0": 512, "chat-decode-0": 128}
    carried = min(find(here, name).throughput_per_s / n for name, n in tokens.items())
    busy = service("chat", avoid=("A10G",), rate_per_s=carried * share)
    asked = joined("100Gbit/s", services=(busy, asked.services[1]))
    plan = made(asked, *CHOSEN[:4])
    assert plan.served_fraction["chat"] == 1.0
    regions = {i.id: i.region for i in plan.instances}
    assert all(len({regions[name] for name in route.instances}) == 1 for route in plan.routes)


@pytest.mark.parametrize(("bandwidth", "latency"), [("100Mbit/s", "1ms"), ("100Gbit/s", "200ms")])
def test_a_link_that_is_too_slow(bandwidth: str, latency: str) -> None:
    asked = joined(bandwidth, latency)
    plan = made(asked, CHOSEN[0], CHOSEN[2], CHOSEN[3])
    assert plan.served_fraction["chat"] == 0.0
    assert validate(plan, asked) == []
    route = Route(service="chat", instances=ACROSS, share=1.0)
    claimed = plan.model_copy(
        update={
            "routes": (*plan.routes, route),
            "status": "feasible",
            "served_fraction": {"chat": 1.0, "mini": 1.0},
        }
    )
    (found,) = broken(claimed, asked)
    assert found.where == "chat-prefill-0 to chat-decode-0"


@given(st.floats(0.5, 60), st.floats(0.5, 60))
def test_services_share_a_link(first: float, second: float) -> None:
    """10 Gbit/s carry the KV of 18.6 prompts a second, whoever's they are."""
    own = {"chat": first, "talk": second}
    asked = joined(
        "10Gbit/s",
        services=[service(name, rate_per_s=rate) for name, rate in own.items()],
        offers=[o.model_copy(update={"available": 9}) for o in problem().offers],
    )
    plan = made(asked, *across(*own))
    assert validate(plan, asked) == []
    catalog = asked.catalog()
    transfer = handover(asked, catalog, asked.services[0])
    assert transfer is not None
    assert transfer.bytes_per_request == 512 * 131_072
    link = catalog.links.between(EAST, WEST).bandwidth_bytes_per_s / transfer.bytes_per_request
    served = {name: plan.served_fraction[name] * rate for name, rate in own.items()}
    assert sum(served.values()) == pytest.approx(min(link, first + second))
    share = min(1.0, link / (first + second))
    assert plan.served_fraction == {name: pytest.approx(share) for name in own}
    if first + second > link * 1.01:
        more = {name: 1.0 for name, rate in own.items()}
        claimed = plan.model_copy(
            update={
                "served_fraction": more,
                "status": "feasible",
                "routes": tuple(
                    Route(
                        service=name,
                        instances=(f"{name}-prefill-0", f"{name}-decode-0"),
                        share=1.0,
                    )
                    for name in own
                ),
            }
        )
        assert f"{EAST} to {WEST}" in {v.where for v in broken(claimed, asked)}


def test_the_more_important_service_has_a_link_first() -> None:
    asked = joined(
        "10Gbit/s",
        services=[
            service("chat", rate_per_s=20.0),
            service("talk", rate_per_s=15.0, priority=2.0),
        ],
        offers=[o.model_copy(update={"available": 9}) for o in problem().offers],
        settings=Settings(on_shortage="priority"),
    )
    plan = made(asked, *across("chat", "talk"))
    link = 1.25e9 / (512 * 131_072)
    assert plan.served_fraction == {"chat": pytest.approx((link - 15) / 20), "talk": 1.0}
    assert validate(plan, asked) == []


def test_a_transfer_that_takes_longer_than_ttft_leaves() -> None:
    asked = problem()
    plan = made(asked, CHOSEN[0], CHOSEN[1], CHOSEN[3])
    assert broken(plan, asked) == []
    thin = asked.replace(overlays=({"links": {"nics": {"L4:1": "50Mbit/s"}}},))
    catalog, chat = thin.catalog(), thin.service("chat")
    allowed = handover(thin, catalog, chat)
    assert allowed is not None
    # 14 of 32 layers of 512 tokens, 29 MB, take 4.7 s at 6.25 MB/s.
    seconds = kv_bytes(catalog.model(chat.model).llm, 0, 14, 512.0) / 6.25e6
    ends = (find(plan, "chat-prefill-0"), find(plan, "chat-decode-0"))
    assert allowed.seconds < seconds <= transfer_s(catalog, chat, *ends)
    found = [v for v in validate(plan, thin, same_problem=False) if v.rule == "handover"]
    assert "chat-prefill-0 to chat-decode-0" in {v.where for v in found}


def test_an_interface_carries_activations_and_kv() -> None:
    asked = joined("100Gbit/s")
    plan = made(asked, CHOSEN[0], CHOSEN[1], CHOSEN[3])
    assert broken(plan, asked) == []
    own = find(plan, "chat-decode-0")
    # 25 Gbit/s carry the KV of 46 prompts/s, and 46 answers are 5,960 tokens.
    flows = tuple(f.model_copy(update={"per_s": 1e5}) for f in own.flows)
    fast = edit(plan, own.id, flows=flows, throughput_per_s=1e5)
    assert [v.where for v in broken(fast, asked)] == ["chat-decode-0 n0"]


def test_a_service_hands_over_with_one_engine() -> None:
    """What plans are compared with: two engines that would fit each other are none that was looked at."""
    sold = (offer(EAST, "A100-40:1", 2.0),)
    chat = (service("chat"),)
    mixed = problem(services=chat, offers=sold, settings=Settings(engines=("vllm", "atoll")))
    assert handover_engine(mixed, mixed.catalog(), chat[0]).name == "vllm"
    own = mixed.replace(settings=Settings(engines=("atoll",)))
    plan = solve(own)
    assert {i.engine for i in plan.instances} == {"atoll"}
    assert validate(plan, own) == []
    found = [v for v in validate(plan, mixed, same_problem=False) if v.rule == "engine"]
    assert {v.where for v in found} >= {i.id for i in plan.instances}
    assert "is handed over by vLLM" in found[0].message
