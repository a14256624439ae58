"""A plan on a cluster: valid as made by hand, and broken one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.cluster import ClusterLink, ClusterNode
from atoll.plan.plan import Flow, Instance, Node, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.assembly import assemble
from tests.plan import builders
from tests.plan.clusters import LINKS, TOKENS, cluster, instance, plan, problem, service


def rules(made: Plan, **changes: object) -> set[str]:
    return {v.rule for v in validate(made, problem(**changes), same_problem=not changes)}


def with_node(index: int, **changes: object) -> Plan:
    own = instance()
    nodes = list(own.nodes)
    nodes[index] = Node.model_validate({**dict(nodes[index]), **changes})
    return with_instance(own.model_copy(update={"nodes": tuple(nodes)}))


def with_instance(own: Instance) -> Plan:
    return plan().model_copy(update={"instances": (own,)})


def scaled(own: Instance, factor: float) -> Instance:
    flows = tuple(f.model_copy(update={"per_s": f.per_s * factor}) for f in own.flows)
    whole = own.throughput_per_s * factor
    return own.model_copy(update={"flows": flows, "throughput_per_s": whole})


def test_the_plan_is_valid() -> None:
    assert rules(plan()) == set()
    assert plan().gap == pytest.approx(1 / 15)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (lambda: with_node(1, host="z"), "host"),
        (lambda: with_node(1, host=None), "host"),
        (lambda: with_node(2, host="d"), "host"),
        (lambda: with_node(1, host="c"), "host"),
        (lambda: with_node(1, region=None), "host"),
        (lambda: with_node(1, node_type="L40S:1"), "host"),
        (lambda: with_node(1, tp=2), "memory"),
        (lambda: with_node(0, end=9), "layers"),
        (lambda: with_node(1, start=7), "layers"),
        (lambda: with_node(1, end=15), "layers"),
        (lambda: with_instance(scaled(instance(), 1.2)), "node-capacity"),
        (lambda: plan().model_copy(update={"objective": 1450.0}), "cost"),
        (lambda: plan().model_copy(update={"bound": 1300.0}), "bound"),
        (lambda: plan().model_copy(update={"gap": 0.5}), "bound"),
    ],
)
def test_one_thing_broken(broken: Callable[[], Plan], rule: str) -> None:
    assert rule in rules(broken())


def test_too_many_layers() -> None:
    own = instance()
    nodes = [n.model_copy(update={"end": 4}) if n.start == 0 else n for n in own.nodes]
    wide = [n.model_copy(update={"start": 4}) if n.end == 16 else n for n in nodes]
    assert "memory" in rules(with_instance(own.model_copy(update={"nodes": tuple(wide)})))


def test_no_room_for_a_request() -> None:
    assert "memory" in rules(plan(), cluster=cluster(kv_fill=0.01))


def test_links_bind_between_nodes_and_hardly_at_the_ends() -> None:
    slow = LINKS[1].model_copy(update={"bytes_per_s": 449.0 * 4096})
    assert "link-capacity" in rules(plan(), cluster=cluster(links=(LINKS[0], slow)))
    enough = LINKS[1].model_copy(update={"bytes_per_s": 451.0 * 4096})
    assert rules(plan(), cluster=cluster(links=(LINKS[0], enough))) == set()
    few = LINKS[0].model_copy(update={"src": "source", "bytes_per_s": 1399.0 * 2})
    assert "link-capacity" in rules(plan(), cluster=cluster(links=(*LINKS, few)))


def test_no_link_no_flow() -> None:
    inside = LINKS[0].model_copy(update={"src": "north", "dst": "north"})
    assert "link-capacity" in rules(plan(), cluster=cluster(links=(inside,)))


def test_pinning_counts_on_clusters_too() -> None:
    assert "pinning" in rules(plan(), services=(service(avoid=("L4",)),))


def test_hosts_need_a_cluster() -> None:
    asked, made = builders.small()
    own = made.instances[0]
    nodes = tuple(n.model_copy(update={"host": "a"}) for n in own.nodes)
    changed = own.model_copy(update={"nodes": nodes})
    broken = made.model_copy(update={"instances": (changed, *made.instances[1:])})
    assert "host" in {v.rule for v in validate(broken, asked)}


NUMBERS = st.floats(0.3, 3.0).filter(lambda x: abs(x - 1) > 1e-3)


@given(st.integers(0, 6), NUMBERS)
def test_any_changed_flow_is_noticed(index: int, factor: float) -> None:
    own = instance()
    flows = list(own.flows)
    flows[index] = flows[index].model_copy(update={"per_s": flows[index].per_s * factor})
    broken = with_instance(own.model_copy(update={"flows": tuple(flows)}))
    assert {"flow", "throughput"} & rules(broken)


@given(st.integers(0, 3), st.integers(0, 15), st.integers(1, 16))
def test_any_changed_range_is_noticed(index: int, start: int, end: int) -> None:
    held = instance().nodes[index]
    if (start, end) == (held.start, held.end):
        return
    assert rules(with_node(index, start=start, end=end))


# Machines that are cut

BOX = ClusterNode(name="box", node_type="L40S:8", region="north")


def cut_problem(**changes: object) -> Problem:
    links = (ClusterLink(src="*", dst="*", bytes_per_s=1e9, latency_s=0.001),)
    own = {"nodes": (BOX,), "links": links, "profiles": {}} | changes
    return problem(cluster=cluster(**own), services=(service(), service("talk")))


def on_gpus(name: str, *gpu_ids: int) -> Instance:
    """One copy of the model on some GPUs of the box, 2 requests/s."""
    node = Node(
        id="n0",
        node_type="L40S:8",
        market="owned",
        start=0,
        end=16,
        tp=1,
        host="box",
        gpu_ids=gpu_ids or None,
    )
    flows = (Flow(src="source", dst="n0", per_s=2.0), Flow(src="n0", dst="sink", per_s=2.0))
    return Instance(
        id=f"{name}-both-0",
        service=name,
        role=f"{name}/llm/both",
        region="north",
        stages=1,
        nodes=(node,),
        flows=flows,
        throughput_per_s=2.0,
        usd_per_hour=0.0,
    )


def cut_plan(asked: Problem, *instances: Instance) -> Plan:
    value = TOKENS * sum(i.throughput_per_s for i in instances)
    return assemble(
        asked, instances, status="feasible", solver="hand", goal="max-flow", value=value
    )


def test_services_share_a_machine_by_its_gpus() -> None:
    asked = cut_problem()
    made = cut_plan(asked, on_gpus("chat", 0), on_gpus("talk", 2, 3))
    assert validate(made, asked) == []
    assert (made.nodes, made.gpus, made.idle_gpus) == (1, 3, 5)
    assert made.served_fraction == {"chat": 1.0, "talk": 1.0}


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ((0, 1), (1, 2), "host"),
        ((0,), (), "host"),  # the whole of it
        ((0, 1, 2), (4,), "slice"),
        ((7, 8), (0,), "slice"),
    ],
)
def test_slices_that_cannot_be(first: tuple[int, ...], second: tuple[int, ...], rule: str) -> None:
    asked = cut_problem()
    made = cut_plan(asked, on_gpus("chat", *first), on_gpus("talk", *second))
    assert rule in {v.rule for v in validate(made, asked)}


def test_a_machine_that_is_whole_is_not_cut() -> None:
    asked = cut_problem()
    whole = asked.replace(offers=[o.model_copy(update={"whole": True}) for o in asked.offers])
    made = cut_plan(whole, on_gpus("chat", 0), on_gpus("talk", 2, 3))
    assert "slice" in {v.rule for v in validate(made, whole)}
    assert validate(cut_plan(whole, on_gpus("chat")), whole) == []


def test_slices_share_the_links_of_their_machine() -> None:
    """Each takes 2 requests/s of 200 tokens of 2 bytes: 800 bytes/s."""
    for bytes_per_s, found in ((1599.0, {"link-capacity"}), (1601.0, set())):
        links = (
            ClusterLink(src="*", dst="*", bytes_per_s=1e9, latency_s=0.001),
            ClusterLink(src="source", dst="box", bytes_per_s=bytes_per_s, latency_s=0.001),
        )
        asked = cut_problem(links=links)
        made = cut_plan(asked, on_gpus("chat", 0), on_gpus("talk", 2, 3))
        assert {v.rule for v in validate(made, asked)} == found


def test_a_cluster_is_not_for_cost() -> None:
    asked = cut_problem()
    made = cut_plan(asked, on_gpus("chat", 0), on_gpus("talk", 2, 3))
    cheap = made.model_copy(update={"goal": "cost", "objective": made.usd_per_hour})
    assert {v.rule for v in validate(cheap, asked)} == {"goal"}
