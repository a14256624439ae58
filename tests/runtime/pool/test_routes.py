"""Weights that a controller tells, and who gets the next request by them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.runtime.pool.member import Backend, Facts
from atoll.runtime.pool.policy import ModelOffer
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import ModelRoutes, RoutesTold, Seat


def told(fleet: str = "", /, **weights: float) -> RoutesTold:
    return RoutesTold(fleet=fleet, models={"m": ModelRoutes(weights=weights)})


def seats(*names: str, kind: str = "L40S") -> list[Seat]:
    return [Seat("", name, kind) for name in names]


@pytest.mark.parametrize(
    ("weights", "present", "expected"),
    [
        ({"a": 0.6, "b": 0.2}, [("a", 1), ("b", 2)], [0.6, 0.2]),
        ({"a": 0.6, "b": 0.2}, [("a", 1), ("b", 2), ("c", 2)], [0.6, 0.2, 0.2]),
        ({"a": 0.6, "b": 0.2}, [("a", 1), ("b", 2), ("d", 3)], [0.6, 0.2, 0.4]),
        ({"a": 0.6, "b": 0.0}, [("a", 1), ("b", 2), ("c", 2)], [0.6, 0.0, 0.6]),
        ({"a": 0.0}, [("a", 1), ("c", 1)], [0.0, 1.0]),
        ({"a": 0.6}, [("c", 1)], None),
        ({}, [("a", 1)], None),
    ],
)
def test_weights_of_those_that_are_there(
    weights: dict[str, float], present: list[tuple[str, int]], expected: list[float] | None
) -> None:
    found = told(**weights).weigh("m", [Seat("", name, kind) for name, kind in present])
    assert found == (expected if expected is None else pytest.approx(expected))


def test_other_models_and_fleets() -> None:
    assert told(a=1.0).weigh("other", seats("a")) is None
    both = [Seat("mine", "a", 0), Seat("theirs", "a", 0)]
    assert told("mine", a=0.3).weigh("m", both) == [0.3, 0.3]  # the second is like the first
    assert told("theirs", a=0.0).weigh("m", both) == [1.0, 0.0]
    assert told("other", a=0.3).weigh("m", both) is None
    assert told("mine", a=0.3).weigh("m", [Seat("", "a", 0)]) == [0.3]
    assert told(a=0.3).weigh("m", [Seat("", "", 0)]) is None


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.0, 0.1, 0.5, 2.0])),
    st.lists(st.sampled_from("abcdefgh"), unique=True),
)
def test_whoever_was_told_has_that_and_nobody_else_gets_nothing(
    weights: dict[str, float], present: list[str]
) -> None:
    found = told(**weights).weigh("m", seats(*present))
    if not set(weights) & set(present):
        assert found is None
        return
    assert found is not None
    for name, weight in zip(present, found, strict=True):
        assert weight == weights[name] if name in weights else weight > 0.0


@pytest.mark.parametrize(
    "data",
    [
        {"models": {"m": {"weights": {"a": -1}}}},
        {"models": {"m": {"weights": {"a": "much"}}}},
        {"models": {"m": {"weights": {"": 1}}}},
        {"models": {"m": {"weights": {"x" * 257: 1}}}},
        {"models": {"m": {"weights": {f"i{k}": 1 for k in range(16_385)}}}},
        {"models": {f"m{k}": {} for k in range(1025)}},
        {"models": {"m": {"promise": {"ttft_s": 0, "tpot_s": 1, "target": 0.9}}}},
        {"models": {"m": {"promise": {"ttft_s": 1, "tpot_s": 1, "target": 1.1}}}},
        {"models": {"m": {"promise": {"ttft_s": 1}}}},
        {"models": {"m": {"wieghts": {}}}},
        {"models": []},
        [],
    ],
)
def test_what_cannot_be_told(data: object) -> None:
    with pytest.raises(InputError) as caught:
        RoutesTold.parse(data)
    assert "\n" not in str(caught.value)


def backend(name: str, **more: object) -> Backend:
    return Backend.parse({"id": name, "url": "http://127.0.0.1:1", "models": ("m",)} | more)


def shares(pool: BackendPool, count: int = 100, prefer: str | None = None) -> Counter[str]:
    found = [pool.pick("m", prefer=prefer) for _ in range(count)]
    return Counter(member.name for member in found if member is not None)


@pytest.mark.parametrize("policy", ["iwrr", "learned"])
def test_pool_follows_what_is_told_for_those_that_come_later_too(policy: str) -> None:
    pool = BackendPool([backend("a"), backend("b")], policy=policy)
    pool.route(told(a=0.75, b=0.25, c=1.0))
    assert shares(pool) == {"a": 75, "b": 25}
    pool.add(backend("c"))
    assert shares(pool, 200) == {"a": 75, "b": 25, "c": 100}
    pool.add(backend("d"))
    assert shares(pool, 120)["d"] == pytest.approx(120 * 0.25, abs=2)
    shown = {str(one["id"]): one["routed"] for one in pool.snapshot()}
    assert shown["a"] == {"m": 0.75}
    assert shown["d"] == {"m": pytest.approx(2 / 3, abs=1e-6)}
    pool.route(RoutesTold())
    assert {str(one["id"]): one["routed"] for one in pool.snapshot()}["a"] == {}


def test_pool_that_was_told_nothing_goes_by_announced_weights() -> None:
    pool = BackendPool([backend("a", weight=3.0), backend("b", weight=1.0)])
    assert shares(pool) == {"a": 75, "b": 25}
    pool.route(told(c=1.0))
    assert shares(pool) == {"a": 75, "b": 25}


@pytest.mark.parametrize(
    "policy", ["iwrr", "random", "least-load", "shortest-queue", "two-choices", "p2c", "learned"]
)
def test_weight_zero_takes_nothing_unless_nothing_else_is_there(policy: str) -> None:
    pool = BackendPool([backend("a"), backend("b"), backend("c")], policy=policy)
    pool.route(told(a=1.0, b=0.0, c=1.0))
    # Not even the conversations that began there.
    for running in (0, 50):
        pool.members["a"].inflight = pool.members["c"].inflight = running
        taken = shares(pool, prefer="b")
        assert taken["b"] == 0
        assert taken.total() == 100
    pool.set_health("a", up=False)
    assert shares(pool).keys() == {"c"}
    pool.set_health("c", up=False)
    assert shares(pool).keys() == {"b"}


def test_a_kind_is_engine_and_gpus() -> None:
    pool = BackendPool()

    def node(name: str, gpu: str) -> None:
        made = Backend(
            id=name,
            url=f"fabric://{name}",
            models=("m",),
            metadata={"instance": f"i-{name}", "fleet": "f"},
        )
        pool.add(made, Facts({"m": ModelOffer(gpus=(gpu,))}))

    node("s1", "H100")
    node("s2", "L4")
    pool.route(told("f", **{"i-s1": 0.8, "i-s2": 0.2}))
    node("s3", "L4")
    node("s4", "H100")
    assert {name: m.seat("m").instance for name, m in pool.members.items()}["s3"] == "i-s3"
    assert pool.rings["m"].weight == pytest.approx([0.8, 0.2, 0.2, 0.8])
