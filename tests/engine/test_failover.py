"""Nodes die in the middle of answers; the answers go on, exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'engine'")

from atoll.core.request_parameters import SamplingParams
from atoll.engine.engine_messages import Heartbeat, SchedulerHello
from atoll.engine.scheduler_core import GenerateRequest, SchedulerSettings
from atoll.engine.sequence_owners import BROKEN_S
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS
from tests.engine.split_router import SplitRouter
from tests.engine.test_exact import PROMPTS, ask, check
from tests.seeds import examples

pytestmark = pytest.mark.engine

PAIRS = [NodeSetup(0, 2), NodeSetup(0, 2), NodeSetup(2, 4), NodeSetup(2, 4)]


@examples(6)
@given(seed=st.integers(0, 100_000))
def test_answers_survive_dead_nodes_token_for_token(tiny: Callable[[str], Any], seed: int) -> None:
    model = tiny("llama")
    chance = random.Random(seed)
    cluster = Cluster(model.folder, LAYERS, PAIRS, seed=seed)
    asked = ask(cluster, [(chance.randrange(12), 12, chance.randrange(20)) for _ in range(4)])
    # One of each pair may be dead at a time.
    for _ in range(chance.randint(1, 4)):
        victim = chance.randrange(4)
        cluster.kill(f"n{victim}")
        for _ in range(chance.randrange(5, 300)):
            cluster.step()
        cluster.revive(f"n{victim}")
        for _ in range(chance.randrange(0, 40)):
            cluster.step()
    check(cluster, asked, model)


@pytest.mark.slow
@examples(5)
@given(seed=st.integers(0, 100_000))
def test_split_answers_survive_too(tiny: Callable[[str], Any], seed: int) -> None:
    model = tiny("llama")
    chance = random.Random(seed)
    setups = [NodeSetup(0, 4), NodeSetup(0, 4), NodeSetup(0, 3), NodeSetup(3, 4), NodeSetup(0, 4)]
    router = SplitRouter(LAYERS, ["n0", "n1"], ["n2", "n3", "n4"])
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=seed)
    asked = ask(cluster, [(chance.randrange(12), 12, chance.randrange(20)) for _ in range(3)])
    cluster.kill(f"n{chance.choice((0, 1, 2, 3))}")
    check(cluster, asked, model)


@pytest.mark.parametrize("end", ["broken", "replaced", "started anew"])
def test_nodes_drop_what_a_dead_scheduler_left(tiny: Callable[[str], Any], end: str) -> None:
    cluster = Cluster(tiny("llama").folder, LAYERS, PAIRS[1:3], seed=1)
    ask(cluster, [(9, 100, 0), (5, 100, 0)])
    cluster.run(until=lambda: all(len(found) >= 4 for found in cluster.events.values()))
    endpoint = cluster.scheduler.endpoint
    for core in cluster.nodes.values():
        assert core.pool.used
        if end == "broken":
            core.note_broken(endpoint)
            core.purge()
            assert core.pool.used
        else:
            reply_to = endpoint if end == "started anew" else "mem://other"
            core.hear_owner(SchedulerHello(reply_to=reply_to, owner="s", incarnation=2))
    cluster.now_s += 2 * BROKEN_S
    for core in cluster.nodes.values():
        core.purge()
        assert core.idle
        assert core.pool.used == 0
        core.pool.check()


def test_a_killed_node_is_noticed_by_silence_and_its_work_moves(
    tiny: Callable[[str], Any],
) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, PAIRS, seed=1)
    asked = ask(cluster, [(9, 12, 0)])
    cluster.run(until=lambda: len(cluster.events["r0"]) >= 4)
    busy = next(c for c in cluster.nodes.values() if not c.idle and c.stage.start == 2)
    cluster.kill(busy.name)
    check(cluster, asked, model)
    assert cluster.events["r0"][-1].restarts == 1
    assert busy.name not in cluster.scheduler.alive


def test_a_node_that_waits_for_a_core_is_not_lost(tiny: Callable[[str], Any]) -> None:
    """Nor is any while the scheduler itself stands still; one that falls silent on a quiet machine is."""
    cluster = Cluster(tiny("llama").folder, LAYERS, [NodeSetup(0, 4)])
    scheduler, node = cluster.scheduler, cluster.nodes["mem://n0"]
    now_s = 0.0

    def tick(seconds: float) -> None:
        nonlocal now_s
        for _ in range(round(seconds / 0.1)):
            now_s += 0.1
            scheduler.tick(now_s)

    def beat() -> None:
        scheduler.handle(Heartbeat(stats=node.stats()), now_s)

    for late_s in (0.1, 0.8, 1.8, 4.0):
        beat()
        tick(late_s)
        assert scheduler.alive, late_s
    beat()
    # The scheduler is stopped: what the node said meanwhile is still to be read.
    now_s += 20.0
    scheduler.tick(now_s)
    assert scheduler.alive
    tick(35.0)
    assert not scheduler.alive
    for _ in range(3000):
        beat()
        tick(0.1)
    tick(1.6)
    assert not scheduler.alive


def test_with_no_replica_left_the_request_ends_with_a_reason(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    limits = SchedulerSettings(dead_after_s=1.0, heartbeat_s=0.1, no_route_s=3.0)
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2), NodeSetup(2, 4)], settings=limits)
    ask(cluster, [(9, 12, 0)])
    cluster.run(until=lambda: len(cluster.events["r0"]) >= 4)
    cluster.kill("n1")
    cluster.run()
    last = cluster.events["r0"][-1]
    assert last.finish_reason == "error"
    assert "silent nodes: n1" in str(last.error)
    assert len(cluster.tokens("r0")) >= 4


def test_a_deadline_ends_a_request(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 4)])
    cluster.kill("n0")
    request = GenerateRequest(tuple(PROMPTS[0]), SamplingParams(), id="r", deadline_s=2.0)
    cluster.submit(request)
    cluster.run()
    assert "deadline" in str(cluster.events["r"][-1].error)


def test_a_seeded_answer_is_the_same_with_and_without_a_death(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
    answers = []
    for kill in (False, True):
        cluster = Cluster(model.folder, LAYERS, PAIRS, seed=4)
        cluster.submit(GenerateRequest(tuple(PROMPTS[9]), sampling, id="r"))
        cluster.run(until=lambda c=cluster: len(c.events["r"]) >= 5)  # type: ignore[misc]
        if kill:
            cluster.kill(next(c for c in cluster.nodes.values() if not c.idle).name)
        cluster.run()
        answers.append(cluster.tokens("r"))
    assert answers[0] == answers[1]
    assert answers[0] != model.answer(PROMPTS[9], 12)
