"""Pipelines inside an instance, by the plan's flows. No sockets, no engine processes."""

from __future__ import annotations

from collections import Counter

import pytest

from atoll.core.errors import InputError
from atoll.engine.engine_messages import NodeStats
from atoll.engine.pipeline_routes import NodeSpec, RouteQuery
from atoll.plan.plan import Instance, Route
from atoll.runtime.instance.instance_config import InstanceConfig, InstancePart, engine_name
from atoll.runtime.instance.plan_router import PlanRouter
from tests.runtime.local.test_placing import even_routes, instance, way


class World:
    """Nodes that live or not, and a router over them."""

    def __init__(
        self,
        *instances: Instance,
        blocks: int = 100,
        routes: tuple[Route, ...] | None = None,
    ) -> None:
        self.parts = tuple(
            InstancePart(instance=i, inboxes={n.id: f"ipc:///x/{i.id}.{n.id}" for n in i.nodes})
            for i in instances
        )
        self.router = PlanRouter(
            InstanceConfig(
                name="x",
                model="m",
                models=("m",),
                parts=self.parts,
                routes=even_routes(instances) if routes is None else routes,
                port=0,
            )
        )
        self.dead: set[str] = set()
        self.blocks = blocks
        self._count = 0

    def route(self, name: str | None = None, prompt: int = 10, expect: float = 0.0) -> list[str]:
        self._count += 1
        request = name or f"r{self._count}"
        self.router.expect(request, expect)
        specs = tuple(
            NodeSpec(
                name=engine_name(p.instance.id, n.id),
                endpoint=p.inboxes[n.id],
                start=n.start,
                end=n.end,
            )
            for p in self.parts
            for n in p.instance.nodes
        )
        stats = {
            spec.name: NodeStats(
                **spec.model_dump(), incarnation=1, block_size=16, blocks=self.blocks
            )
            for spec in specs
        }
        alive = tuple(spec for spec in specs if spec.name not in self.dead)
        found = self.router(RouteQuery(request, prompt, alive, stats, {}))
        return [] if found is None else [hop.node for hop in found.hops]


SIBLINGS = [(0, 2), (2, 4), (2, 4)]


def test_siblings_take_turns() -> None:
    world = World(instance(SIBLINGS, "a"))
    seen = Counter(world.route()[1] for _ in range(100))
    assert seen == {"a/n1": 50, "a/n2": 50}


def test_the_dead_are_left_out_and_come_back() -> None:
    world = World(instance(SIBLINGS, "a"))
    world.dead = {"a/n1"}
    assert {world.route()[1] for _ in range(10)} == {"a/n2"}
    world.dead = {"a/n1", "a/n2"}
    assert world.route() == []
    world.dead = set()
    assert {world.route()[1] for _ in range(10)} == {"a/n1", "a/n2"}


def test_full_nodes_are_masked_until_a_request_ends() -> None:
    world = World(instance([(0, 4)], "a"), blocks=100)  # 1600 tokens, 1440 of them to be booked
    assert world.route("one", prompt=700, expect=300)
    assert world.route("two", prompt=700, expect=300) == []
    world.router.finish("one")
    assert world.route("two", prompt=700, expect=300) == ["a/n0"]


def test_what_outgrows_its_estimate_counts_for_more() -> None:
    world = World(instance([(0, 4)], "a"), blocks=100)
    assert world.route("one", prompt=500, expect=10)
    assert world.route("two", prompt=500, expect=10)
    world.router.finish("two")
    world.router.grow("one", 600)
    assert world.route("two", prompt=500, expect=10) == []


def test_a_request_too_long_ever_to_be_counted_is_tried_all_the_same() -> None:
    world = World(instance([(0, 4)], "a"), blocks=10)
    assert world.route(prompt=5000) == ["a/n0"]


def test_a_restart_gives_back_what_the_first_try_held() -> None:
    world = World(instance([(0, 4)], "a"), blocks=100)
    for _ in range(5):
        assert world.route("one", prompt=1000)


def test_prompts_and_answers_apart() -> None:
    world = World(
        instance([(0, 4)], "p", "prefill"),
        instance([(0, 1), (1, 4)], "d0", "decode"),
        instance([(0, 3), (3, 4)], "d1", "decode"),
    )
    seen = Counter(tuple(world.route()) for _ in range(20))
    assert seen == {("p/n0", "d0/n0", "d0/n1"): 10, ("p/n0", "d1/n0", "d1/n1"): 10}
    world.dead = {"d0/n1"}
    assert {tuple(world.route()) for _ in range(4)} == {("p/n0", "d1/n0", "d1/n1")}


def apart(region: str = "here") -> tuple[Instance, ...]:
    """Two prefill and two decode instances; the second of each stands in a region."""
    made = [instance([(0, 4)], name, phase) for name, phase in PARTS]
    return tuple(
        i.model_copy(update={"region": region if i.id.endswith("1") else "here"}) for i in made
    )


PARTS = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
PAIRS = (way(0.75, "p0", "d0"), way(0.25, "p1", "d1"))


def test_requests_follow_the_pairs_of_the_plan() -> None:
    world = World(*apart(), routes=PAIRS)
    seen = Counter(tuple(world.route()) for _ in range(40))
    assert seen == {("p0/n0", "d0/n0"): 30, ("p1/n0", "d1/n0"): 10}


def test_without_its_partner_a_prefill_instance_uses_another_of_its_region() -> None:
    world = World(*apart(), routes=PAIRS)
    world.dead = {"d0/n0"}
    seen = Counter(tuple(world.route()) for _ in range(40))
    assert seen == {("p0/n0", "d1/n0"): 30, ("p1/n0", "d1/n0"): 10}
    world.dead = set()
    assert ("p0/n0", "d0/n0") in {tuple(world.route()) for _ in range(4)}


def test_kv_caches_stay_in_their_region_when_nodes_die() -> None:
    world = World(*apart("there"), routes=PAIRS)
    world.dead = {"d0/n0"}
    assert {tuple(world.route()) for _ in range(10)} == {("p1/n0", "d1/n0")}
    world.dead = {"d0/n0", "p1/n0"}
    assert world.route() == []


def test_a_full_partner_makes_the_pair_wait_not_change() -> None:
    # 1600 tokens each, 1440 of them to be booked; a prompt of 1000 fills a node.
    world = World(*apart(), routes=PAIRS, blocks=100)
    assert world.route("one", prompt=1000) == ["p0/n0", "d0/n0"]
    assert world.route("two", prompt=1000) == ["p1/n0", "d1/n0"]
    assert world.route("three", prompt=1000) == []
    world.router.finish("two")
    assert world.route("three", prompt=1000) == ["p1/n0", "d1/n0"]


def test_a_part_that_is_helped_works_alone_until_somebody_helps() -> None:
    decode = instance([(0, 4)], "d", "decode")
    world = World(decode.model_copy(update={"role": "qwen3-32b/llm/both"}))
    own = InstancePart(instance=decode, inboxes={"n0": "ipc:///x/d.n0"})
    alone = InstanceConfig(
        name="x", model="m", models=("m",), parts=(own,), port=0, helpers="helpers.json"
    )
    world.router, world.parts = PlanRouter(alone), (own,)
    assert world.route("first", prompt=1000) == ["d/n0"]
    helpers = tuple(
        InstancePart(
            instance=instance([(0, 4)], name, "prefill"), inboxes={"n0": f"ipc:///x/{name}"}
        )
        for name in ("p0", "p1")
    )
    pairs = (way(0.75, "p0", "d"), way(0.25, "p1", "d"))
    world.parts = (own, *helpers)
    world.router.follow(alone.model_copy(update={"parts": world.parts, "routes": pairs}))
    # What it holds of the first request is still held: there is no room for another long one.
    assert world.route("second", prompt=1000) == []
    world.router.finish("first")
    world.router.finish("second")
    seen = Counter(tuple(world.route()) for _ in range(40))
    assert seen == {("p0/n0", "d/n0"): 30, ("p1/n0", "d/n0"): 10}
    world.dead = {"p0/n0"}
    assert {tuple(world.route()) for _ in range(4)} == {("p1/n0", "d/n0")}
    world.dead = {"p0/n0", "p1/n0"}
    assert world.route() == ["d/n0"]
    world.dead = {"d/n0"}
    assert world.route() == []


def test_routes_lead_over_parts_in_their_order() -> None:
    for routes, why in (
        ((), "4 parts and no routes"),
        ((way(1.0, "d0", "p0"),), "a route over d0, p0"),
        ((way(1.0, "p0"),), "a route over p0"),
        ((way(1.0, "p0", "d9"),), "a route over p0, d9"),
    ):
        config = {
            "name": "x",
            "model": "m",
            "models": ["m"],
            "parts": [part.model_dump() for part in World(*apart(), routes=PAIRS).parts],
            "routes": [route.model_dump() for route in routes],
            "port": 0,
        }
        with pytest.raises(InputError, match=why):
            InstanceConfig.parse(config)


def test_phases_must_fit() -> None:
    part = World(instance([(0, 4)], "a")).parts[0].model_dump()
    part["instance"]["role"] = "qwen3-32b/llm/prefill"
    config = {"name": "x", "model": "m", "models": ["m"], "parts": [part], "port": 0}
    with pytest.raises(InputError, match="parts for prefill"):
        InstanceConfig.parse(config)
