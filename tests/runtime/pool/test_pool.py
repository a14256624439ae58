"""Who gets the next request, and who is left alone for a while."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import OutlierSettings
from atoll.runtime.pool.pool import BackendPool


def backend(name: str, weight: float = 1.0, **more: object) -> Backend:
    fields = {"id": name, "url": "http://127.0.0.1:1", "models": ("m",), "weight": weight}
    return Backend.parse(fields | more)


def pool(*weights: float, **more: object) -> BackendPool:
    return BackendPool([backend(f"b{i}", w) for i, w in enumerate(weights)], **more)  # type: ignore[arg-type]


def picked(pool: BackendPool, *, squeeze: bool = False) -> str | None:
    found = pool.pick("m", squeeze=squeeze)
    return None if found is None else found.backend.id


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_shares_are_those_of_the_plan_and_smooth(weights: list[int]) -> None:
    them = pool(*map(float, weights))
    total = sum(weights)
    counts: Counter[str | None] = Counter()
    for number in range(1, 3 * total + 1):
        counts[picked(them)] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"b{i}"] - number * weight / total) < 1.0 + 1e-6


def test_busy_and_slow_ones_are_passed_over() -> None:
    them = pool(1.0, 1.0)
    them.members["b0"].inflight = 40
    assert {picked(them) for _ in range(10)} == {"b1"}
    them.members["b1"].inflight = 30
    assert {picked(them) for _ in range(10)} == {"b0", "b1"}


def test_drained_ones_get_nothing_until_they_are_taken_back() -> None:
    them = pool(1.0, 1.0)
    told: list[tuple[str, str]] = []
    them.listeners.append(lambda event, member: told.append((event, member.name)))
    them.drain("b0")
    them.drain("b0")
    assert {picked(them, squeeze=True) for _ in range(10)} == {"b1"}
    assert them.pick("m", {"b1"}, squeeze=True) is them.members["b1"]
    # Its health is watched all the same, and says nothing of whether it serves.
    them.set_health("b0", up=False, reason="gone")
    assert them.members["b0"].state == "down"
    them.set_health("b0", up=True)
    assert (them.members["b0"].state, them.members["b0"].up) == ("drained", False)
    them.update(backend("b0", 2.0))
    assert them.members["b0"].drained
    them.drain("b1")
    assert picked(them, squeeze=True) is None
    assert them.unserved() == ["m"]
    them.take_back("b0")
    assert {picked(them) for _ in range(10)} == {"b0"}
    assert told == [
        ("drained", "b0"),
        ("down", "b0"),
        ("up", "b0"),
        ("changed", "b0"),
        ("drained", "b1"),
        ("returned", "b0"),
    ]
    # A backend that was removed and comes again is a new one.
    them.remove("b1")
    them.add(backend("b1"))
    assert not them.members["b1"].drained


def test_full_down_and_avoided() -> None:
    them = BackendPool([backend("b0", max_inflight=2), backend("b1", max_inflight=1)])
    them.members["b0"].inflight = 2
    assert picked(them) == "b1"
    them.members["b1"].inflight = 1
    assert picked(them) is None
    assert picked(them, squeeze=True) in ("b0", "b1")
    them.set_health("b0", up=False, reason="gone")
    assert picked(them, squeeze=True) == "b1"
    only = them.pick("m", {"b1"}, squeeze=True)
    assert only is not None
    assert only.backend.id == "b1"
    assert them.pick("m", {"b1"}) is None
    them.set_health("b1", up=False)
    assert picked(them, squeeze=True) is None
    assert them.pick("unknown") is None


def test_weight_zero_is_the_last_resort() -> None:
    them = pool(1.0, 0.0)
    assert {picked(them) for _ in range(5)} == {"b0"}
    them.set_health("b0", up=False)
    assert picked(them) == "b1"
    assert {picked(pool(0.0, 0.0)) for _ in range(1)} <= {"b0", "b1"}


@pytest.mark.parametrize(
    "policy",
    ["iwrr", "random", "least-load", "shortest-queue", "two-choices", "p2c", "swarm", "learned"],
)
def test_every_policy_picks_among_the_well(policy: str) -> None:
    them = pool(1.0, 2.0, 3.0, policy=policy)
    them.set_health("b1", up=False)
    assert {picked(them) for _ in range(60)} <= {"b0", "b2"}
    with pytest.raises(UnknownNameError):
        BackendPool(policy="nonsense")


def test_backends_come_go_and_change() -> None:
    them = pool(1.0)
    told: list[tuple[str, str]] = []
    them.listeners.append(lambda event, member: told.append((event, member.backend.id)))
    them.add(backend("x", models=("other",)))
    with pytest.raises(InputError):
        them.add(backend("x"))
    with pytest.raises(UnknownNameError):
        them.remove("nobody")
    assert them.models == ["m", "other"]
    them.update(backend("x", models=("m",)))
    them.update(backend("x", models=("m",)))
    assert not them.serves("other")
    them.replace([backend("x", models=("m",)), backend("y")])
    assert list(them.members) == ["x", "y"]
    assert told == [("added", "x"), ("changed", "x"), ("removed", "b0"), ("added", "y")]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "ftp://h",
        "http://",
        "http://h:0",
        "http://h:99999",
        "http://u@h",
        "http://h/?q",
        "http://h h",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(AtollError, match="url"):
        backend("b", url=url)


def test_url_may_end_in_the_version() -> None:
    assert backend("b", url="https://api.example/v1/").url == "https://api.example"


def fail(them: BackendPool, member: Member, times: int, now_s: float) -> None:
    for _ in range(times):
        them.note_failure(member, now_s, "scripted")


def test_five_failures_in_a_row_eject_for_longer_each_time() -> None:
    them = pool(1.0, 1.0)
    bad = them.members["b0"]
    fail(them, bad, 4, 0.0)
    them.note_success(bad, 0.1)
    fail(them, bad, 4, 0.0)
    assert bad.state == "up"
    fail(them, bad, 1, 0.0)
    assert bad.state == "ejected"
    assert {picked(them) for _ in range(5)} == {"b1"}
    them.tick(29.9)
    assert bad.state == "ejected"
    them.tick(30.0)
    assert bad.state == "up"
    fail(them, bad, 5, 30.0)
    them.tick(89.0)
    assert bad.state == "ejected"
    them.tick(90.0)
    assert bad.state == "up"


def test_max_backends_stay_and_the_ejected_are_better_than_none() -> None:
    them = pool(1.0, 1.0)
    for member in them.members.values():
        fail(them, member, 50, 0.0)
    assert [m.state for m in them.members.values()] == ["ejected", "up"]
    them.set_health("b1", up=False)
    assert picked(them) == "b0"


def test_success_rate_far_below_the_others_ejects() -> None:
    them = pool(*[1.0] * 10, outliers=OutlierSettings(consecutive_5xx=1000))
    them.tick(0.0)
    for name, member in them.members.items():
        for number in range(200):
            if name == "b3" and number % 2:
                them.note_failure(member, 1.0, "scripted")
            else:
                them.note_success(member, 0.1)
    told: list[str] = []
    them.listeners.append(lambda event, member: told.append(f"{event} {member.backend.id}"))
    them.tick(10.0)
    assert told == ["ejected b3"]


def test_snapshot_hides_secrets() -> None:
    them = BackendPool([backend("b", metadata={"api_key": "s3cret", "region": "here"})])
    assert "s3cret" not in str(them.snapshot())
    assert "here" in str(them.snapshot())


def test_masked_ones_get_nothing_and_nothing_is_moved() -> None:
    them = pool(1.0, 1.0)
    told: list[str] = []
    them.listeners.append(lambda event, member: told.append(f"{event} {member.name}"))
    them.mask("b0", "away")
    them.mask("b0", "away")
    assert them.members["b0"].state == "down"
    assert {picked(them) for _ in range(4)} == {"b1"}
    them.set_health("b0", up=True)
    assert picked(them) is not None
    them.mask("b0", "away")
    them.set_health("b0", up=False, reason="gone")
    them.set_health("b0", up=False, reason="gone")
    assert told == ["masked b0", "up b0", "masked b0", "down b0"]


@pytest.mark.parametrize("policy", ["iwrr", "learned", "p2c"])
def test_what_is_not_allowed_is_never_taken(policy: str) -> None:
    them = pool(1.0, 1.0, 1.0, policy=policy)

    def allow(member: Member) -> bool:
        return member.name == "b1"

    assert {them.pick("m", allow=allow) for _ in range(9)} == {them.members["b1"]}
    assert them.pick("m", {"b1"}, allow=allow) is None
    found = them.pick("m", {"b1"}, squeeze=True, allow=allow)
    assert found is them.members["b1"]
    them.set_health("b1", up=False)
    assert them.pick("m", squeeze=True, allow=allow) is None
    alone = pool(1.0, policy=policy)
    assert alone.pick("m", squeeze=True, allow=lambda _member: False) is None


def test_weights_count_where_all_were_given_else_speed() -> None:
    given = BackendPool([backend("b0", 1.0), backend("b1", 3.0)], policy="learned")
    counts = Counter(given.pick("m").name for _ in range(40))  # type: ignore[union-attr]
    assert counts == {"b0": 10, "b1": 30}
    assert given.decisions["weights"] == 40
    fields = {"url": "http://127.0.0.1:1", "models": ("m",)}
    learned = BackendPool(
        [backend("b0", 1.0), Backend.parse(fields | {"id": "b1"})], policy="learned"
    )
    assert learned.learns
    for name, seconds in (("b0", 1.0), ("b1", 10.0)):
        for number in range(5):
            learned.learn(learned.members[name], "m", 100.0, seconds, 0.0, float(number))
    assert {learned.pick("m", now_s=5.0).name for _ in range(9)} == {"b0"}  # type: ignore[union-attr]
    assert learned.decisions["learned"] == 9
    # What others sent there counts too.
    learned.members["b0"].elsewhere = 100
    assert learned.pick("m", now_s=5.0).name == "b1"  # type: ignore[union-attr]
    ring = learned.rings["m"]
    assert ring.expected_s(learned.members["b1"], 100.0) == pytest.approx(10.0, rel=0.2)
    # Speeds outlive a change of the pool; a member without any is taken for a slow one.
    learned.add(Backend.parse(fields | {"id": "b2"}))
    ring = learned.rings["m"]
    assert ring.expected_s(learned.members["b2"], 100.0) == pytest.approx(10.0, rel=0.2)
    assert BackendPool([backend("x")]).rings["m"].expected_s(learned.members["b0"], 1.0) is None


def test_who_served_a_conversation_serves_it_again_unless_busy() -> None:
    for policy in ("learned", "iwrr"):
        fields = {"url": "http://127.0.0.1:1", "models": ("m",)}
        them = BackendPool(
            [Backend.parse(fields | {"id": f"b{i}"}) for i in range(3)], policy=policy
        )
        for member in them.members.values():
            for number in range(10):
                them.learn(member, "m", 100.0, 1.0, 0.0, float(number))

        def home(them: BackendPool = them) -> str:
            return them.pick("m", prefer="b2", now_s=11.0).name  # type: ignore[union-attr]

        assert {home() for _ in range(6)} == {"b2"}
        them.members["b2"].inflight = 3
        assert {home() for _ in range(6)} == {"b2"}
        them.members["b2"].inflight = 40
        assert "b2" not in {home() for _ in range(6)}
        them.members["b2"].inflight = 0
        them.mask("b2", "away")
        assert "b2" not in {home() for _ in range(6)}


def test_services_and_aliases() -> None:
    them = BackendPool(
        [
            backend("a", models=(), services=("echo",)),
            backend("b", models=("m",), aliases={"mini": "m"}),
        ]
    )
    assert them.models == ["m"]
    assert them.aliases == {"mini": ("m",)}
    assert them.pick_service("echo", (), 0.0) is them.members["a"]
    assert them.pick_service("other", (), 0.0) is None
    assert them.pick("echo") is None
    with pytest.raises(AtollError, match="models"):
        backend("c", models=())


def test_a_new_file_does_not_take_the_nodes_of_a_fabric() -> None:
    them = pool(1.0)
    them.add(backend("n", url="fabric://m001-0123456789abcdef"))
    them.replace([backend("y")])
    assert list(them.members) == ["n", "y"]
