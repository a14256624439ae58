"""Random schedules of everything that may happen: nobody comes back to life, and no ghost stays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from atoll.fabric.registry import fabric_registry as rules
from atoll.fabric.registry.effects import RegistrySettings
from atoll.fabric.registry.records import Record, SessionState
from tests.fabric.registry import schedules
from tests.fabric.registry.network import Broken, Network

DAY_S = 24 * 3600.0


def run(seeds: range) -> Counter[str]:
    """Run them all and return how often the interesting things happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            net = schedules.run(seed)
        except Broken as broken:
            raise AssertionError(f"schedule {seed}: {broken}") from None
        for node in net.nodes:
            seen["killed"] += not node.alive
            seen["buried alive"] += sum(session.cause == "left" for session in node.sessions)
            seen["well again"] += sum(session.cause == "back" for session in node.sessions)
            seen["obituaries"] += node.registry.counts["obituaries"]
            olds = [session.old for session in node.sessions]
            assert len(olds) == len(set(olds)), f"schedule {seed}: one cause, two sessions"
    return seen


def test_nobody_comes_back_and_no_ghost_stays() -> None:
    seen = run(range(200))
    for what in ("killed", "buried alive", "well again", "obituaries"):
        assert seen[what] > 10, f"{what} hardly ever happened"


@pytest.mark.slow
def test_nobody_comes_back_and_no_ghost_stays_in_a_hundred_thousand_schedules() -> None:
    run(range(200, 104_000))


def rev_first(self: Record) -> object:
    return (self.rev, int(self.state), self.signed_s, self.body, self.certificate)


def latest_first(self: Record) -> object:
    return (self.signed_s, int(self.state), self.rev, self.body, self.certificate)


def no_tie_break(self: Record) -> object:
    return (int(self.state), self.rev)


@pytest.mark.parametrize("wrong", [rev_first, latest_first, no_tie_break])
def test_a_wrong_order_is_caught(
    wrong: Callable[[Record], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "rank", property(wrong))
    with pytest.raises(AssertionError, match="schedule"):
        run(range(200))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (rules.Registry, "_bury", lambda self, now_s: []),
        (rules, "foreign", lambda record, own: False),
    ],
    ids=["no obituaries", "no new session"],
)
def test_a_missing_rule_is_caught(
    where: object, name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError, match="schedule"):
        run(range(200))


def days(seed: int, settings: RegistrySettings) -> None:
    """Days of deaths and replays with clocks that differ: `Network.check` sees who comes back."""
    rng = random.Random(seed)
    net = Network(seed, settings=settings, skew_s=150.0)
    for slot in ("h0", "h1", "m001"):
        net.start(slot)
    for _ in range(40):
        # Either some way into a day, or just around the end of one: there it is decided.
        net.now_s += rng.choice((600.0, 3 * 3600.0, DAY_S - 200.0, 100.0, 60.0))
        for node in net.living:
            net.look(node)
            net.tick(node)
        for _ in range(4):
            net.replay(rng.choice(net.living), rng.choice(net.said))
        asker, peer = rng.sample(net.living, 2)
        net.exchange(asker, peer)
        net.flying.clear()
        for node in net.living:
            if node.registry.slot == "m001" and rng.random() < 0.3:
                net.kill(node)
                net.start("m001")


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 80), marks=pytest.mark.slow)], ids=str
)
def test_forgetting_brings_nobody_back(seeds: range) -> None:
    settings = RegistrySettings(gap_s=float("inf"))
    for seed in seeds:
        days(seed, settings)


def a_day_later(owner_s: float, hub_s: float, other_s: float) -> None:
    """A member dies, a hub says so, and everything the member said is replayed a day later.

    The arguments are by how much the clocks of the three are off, seconds.
    """
    net = Network(0, settings=RegistrySettings(gap_s=float("inf")))
    hub, other, owner = net.start("h0"), net.start("m002"), net.start("m001")
    for node, skew_s in ((hub, hub_s), (other, other_s), (owner, owner_s)):
        node.skew_s = skew_s
        net.tick(node)  # a clock that was set far is noticed, and what it signed is signed again
    net.announce(owner, SessionState.SERVING, "last words")
    last, ended = net.said[-1], owner.sid
    for _ in range(2):
        while net.flying:
            net.deliver(0)
        net.kill(owner)
        net.now_s += 71.0
        net.tick(hub)
    entry = other.registry.get(ended)
    assert entry is not None
    assert entry.record.state is SessionState.LEFT
    net.now_s += DAY_S - 1200.0
    for _ in range(120):
        net.now_s += 20.0
        net.tick(other)
        net.replay(other, last)
        assert ended not in other.registry.peers()
    assert ended not in other.registry.entries()


CLOCKS = tuple((o, h, t) for o in (0, 150) for h in (-150, 0, 150) for t in (-150, 0, 150))


@pytest.mark.parametrize("clocks", CLOCKS, ids=str)
def test_no_replay_brings_anybody_back_a_day_later(clocks: tuple[float, float, float]) -> None:
    a_day_later(*clocks)


def test_forgetting_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the allowance for clocks, a record outlives the LEFT that ended it."""
    original = rules.Registry._forget

    def hasty(self: rules.Registry, now_s: float) -> object:
        effects = original(self, now_s + 2 * self.settings.skew_s)
        self._forget_s = now_s
        return effects

    monkeypatch.setattr(rules.Registry, "_forget", hasty)
    with pytest.raises(Broken, match="came back to life"):
        a_day_later(150.0, -150.0, 0.0)


def test_a_session_cut_off_for_a_minute_is_replaced_not_revived() -> None:
    net = Network(3)
    hub, cut = net.start("h0"), net.start("m001")
    net.settle()
    old, cut.part = cut.sid, 1
    for _ in range(3):
        net.look(hub)
        net.look(cut)
        net.now_s += 40.0
        net.tick(hub)
        net.tick(cut)
    known = hub.registry.get(old)
    assert known is not None
    assert known.record.state is SessionState.LEFT
    net.settle()
    assert [(s.old, s.cause) for s in cut.sessions] == [(old, "left")]
    assert set(hub.registry.peers()) == {cut.sid}
