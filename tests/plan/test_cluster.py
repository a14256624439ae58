"""Clusters: which link joins two nodes, what is on offer, and that nothing else changes its hash."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.cluster import Cluster, ClusterLink, NodeProfile
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from tests.plan import builders
from tests.plan.clusters import LINKS, NODES, cluster, plan, problem, profile


def rule(src: str, dst: str, mega: float, **changes: object) -> ClusterLink:
    values: dict[str, object] = {"src": src, "dst": dst, "bytes_per_s": mega * 1e6}
    return ClusterLink.model_validate(values | changes)


def speed(own: Cluster, src: str, dst: str) -> float | None:
    link = own.link(src, dst)
    return None if link is None else link.bytes_per_s / 1e6


def test_the_max_specific_rule_counts() -> None:
    own = cluster(
        links=(
            rule("a", "b", 1),
            rule("north", "b", 2),
            rule("north", "north", 3),
            rule("*", "north", 4),
            rule("*", "*", 5),
        )
    )
    assert speed(own, "a", "b") == 1
    assert speed(own, "b", "a") == 1
    assert speed(own, "c", "a") == 4
    assert speed(own, "source", "a") == 4
    assert speed(own, "c", "d") == 5
    assert speed(own, "d", "sink") == 5


def test_the_last_of_equal_rules_counts() -> None:
    own = cluster(links=(rule("a", "*", 1), rule("north", "south", 2)))
    assert speed(own, "a", "c") == 2
    turned = cluster(links=(rule("north", "south", 2), rule("a", "*", 1)))
    assert speed(turned, "a", "c") == 1


def test_one_way_leaves_the_other_alone() -> None:
    own = cluster(links=(rule("*", "*", 1), rule("a", "b", 9, one_way=True)))
    assert (speed(own, "a", "b"), speed(own, "b", "a")) == (9, 1)


def test_no_rule_no_link() -> None:
    own = cluster(links=(rule("north", "north", 1),))
    assert speed(own, "a", "c") is None
    assert speed(own, "source", "a") is None
    with pytest.raises(UnknownNameError):
        own.link("a", "z")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"links": (rule("a", "z", 1),)}, "'z'"),
        ({"nodes": (*NODES, NODES[0])}, "'a' names two things"),
        ({"nodes": (NODES[0].model_copy(update={"name": "north"}),)}, "'north' names two things"),
        ({"nodes": (NODES[0].model_copy(update={"name": "source"}),)}, "'source' names two"),
        ({"nodes": ()}, "at least 1"),
    ],
)
def test_bad_clusters(changes: dict[str, object], said: str) -> None:
    whole: dict[str, object] = {"nodes": NODES, "links": LINKS, **changes}
    with pytest.raises(InputError, match=said):
        Cluster.parse(whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_tokens": (1.0,)}, "kv_tokens has 1 values for 1 to 3 layers"),
        ({"tokens_per_s": (1.0, 2.0, 0.0)}, "greater than 0"),
        ({"decode_s_per_layer": ((2.0, 1.0), (1.0, 2.0))}, "must rise"),
        ({"typical_layers": (2, 4)}, "typically 4 layers, and 3 at most"),
    ],
)
def test_bad_profiles(changes: dict[str, object], said: str) -> None:
    whole = {**profile(3, 100.0).model_dump(), **changes}
    with pytest.raises(InputError, match=said):
        NodeProfile.parse(whole)


def test_offers_are_the_nodes() -> None:
    keys = [(offer.key, offer.available) for offer in problem().offers]
    assert keys == [
        (("north", "L40S:1", "owned"), 1),
        (("north", "L4:1", "owned"), 1),
        (("south", "L4:1", "owned"), 2),
    ]
    assert all(offer.usd_per_hour == 0 for offer in problem().offers)


def offer(**changes: object) -> Offer:
    values: dict[str, object] = {"region": "south", "node_type": "L4:1", "market": "owned"}
    return Offer.model_validate({**values, "available": 2, "usd_per_hour": 0.3, **changes})


def test_a_price_can_be_given() -> None:
    asked = problem(offers=(offer(),))
    found = asked.offer("south", "L4:1", "owned")
    assert found is not None
    assert found.usd_per_hour == 0.3
    assert len(asked.offers) == 3
    assert asked.replace(name="other").offers == asked.offers


@pytest.mark.parametrize("changes", [{"available": 3}, {"region": "east"}, {"market": "spot"}])
def test_nothing_else_is_on_offer(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="the cluster owns"):
        Problem.parse({**dict(problem()), "offers": (offer(**changes),)})


def test_json_gives_it_back() -> None:
    asked, made = problem(), plan()
    assert Problem.from_json(asked.to_json()) == asked
    assert Plan.from_json(made.to_json()) == made
    assert Problem.from_json(asked.to_json()).content_hash() == asked.content_hash()


def test_what_has_no_cluster_keeps_its_hash() -> None:
    asked = builders.problem()
    dumped = asked.model_dump(mode="json")
    assert "cluster" not in dumped
    _, made = builders.small()
    nodes = [node for instance in made.model_dump()["instances"] for node in instance["nodes"]]
    assert nodes
    assert all(set(node) == {"id", "node_type", "market", "start", "end", "tp"} for node in nodes)


def test_the_order_of_nodes_changes_nothing() -> None:
    turned = problem(cluster=cluster(nodes=NODES[::-1]))
    assert turned.content_hash() == problem().content_hash()
