"""Where a placement is full."""

from __future__ import annotations

import pytest

from atoll.plan.plan import Instance
from atoll.solve.place.bottleneck import bottleneck, link_use, node_use
from tests.plan.clusters import LINKS, TOKENS, cluster, instance, problem


def at(first: float, second: float, third: float) -> Instance:
    """The instance with other flows over b, c and d, in tokens/s."""
    own = instance()
    parts = {"n1": first, "n2": second, "n3": third, "n0": first + second + third}
    flows = []
    for flow in own.flows:
        place = flow.dst if flow.src == "source" else flow.src if flow.dst == "sink" else flow.dst
        flows.append(flow.model_copy(update={"per_s": parts[place] / TOKENS}))
    whole = parts["n0"] / TOKENS
    return own.model_copy(update={"flows": tuple(flows), "throughput_per_s": whole})


def test_what_is_used() -> None:
    asked = problem()
    nodes = node_use(instance(), asked, asked.catalog())
    assert nodes["n0"].capacity == pytest.approx(1500.0)
    assert nodes["n0"].share == pytest.approx(1400 / 1500)
    assert nodes["n1"].share == pytest.approx(1.0)
    links = link_use(instance(), asked, asked.catalog())
    assert links["n0", "n2"].capacity == pytest.approx(4e6 / 4096)
    assert links["source", "n0"].capacity == pytest.approx(1e9 / 2)
    assert set(links) == {
        ("source", "n0"),
        *(("n0", f"n{i}") for i in (1, 2, 3)),
        *((f"n{i}", "sink") for i in (1, 2, 3)),
    }


def test_more_could_flow() -> None:
    asked = problem()
    assert bottleneck(instance(), asked, asked.catalog()) is None


def test_a_full_node() -> None:
    asked = problem()
    cut = bottleneck(at(500.0, 500.0, 500.0), asked, asked.catalog())
    assert cut is not None
    assert [node.host for node in cut.nodes] == ["a"]
    assert cut.links == ()
    assert str(cut) == "L40S:1 with 8 layers: 1,500 tokens/s"


def test_full_links_and_a_full_node() -> None:
    slow = LINKS[1].model_copy(update={"bytes_per_s": 300.0 * 4096})
    asked = problem(cluster=cluster(links=(LINKS[0], slow)))
    cut = bottleneck(at(500.0, 300.0, 300.0), asked, asked.catalog())
    assert cut is not None
    assert [node.host for node in cut.nodes] == ["b"]
    assert set(cut.links) == {("a", "c"), ("a", "d")}
    assert str(cut) == "L4:1 with 8 layers + links a -> c, a -> d: 1,100 tokens/s"


def test_unused_links_count() -> None:
    """d carries nothing yet: what could still go there is no bottleneck elsewhere."""
    asked = problem()
    assert bottleneck(at(500.0, 500.0, 0.0), asked, asked.catalog()) is None
