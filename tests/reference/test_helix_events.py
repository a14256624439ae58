"""Helix's rules on clusters worked out by hand, and on its own, where its figures are known to the digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.reference.helix_events import GATHER_S, IWRR, OURS, Placed, Run, Work, run

# What it judges runs in the full run, and compiling it takes a quarter of a minute.
pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[3] / "shared/data"
ACTIVATION = 1000.0
LAYER_S, TOKEN_S, LINK_S = 0.1, 0.01, 0.5


def placed(
    ranges: list[tuple[int, int]], ways: list[tuple[int, int, float]], entries: float = 1e6
) -> Placed:
    """Equal nodes: 0.1 s a layer for a prompt, 0.01 s for a token; links of 1 MB/s and 0.5 s."""
    nodes = len(ranges)
    start, end = np.array(ranges).T
    many = np.full(nodes, 100)
    return Placed(
        layers=int(end.max()),
        start=start.copy(),
        end=end.copy(),
        kv_entries=np.full(nodes, entries),
        prompt_requests=np.full(nodes, 1),
        prompt_tokens=many,
        decode_requests=many,
        decode_context=many * 1000,
        prompt_s=np.tile(np.where(np.arange(101) > 0, LAYER_S, 0.0), (nodes, 1)),
        decode_s=np.tile(np.where(np.arange(101) > 0, TOKEN_S, 0.0), (nodes, 1)),
        activation_bytes=ACTIVATION,
        token_bytes=10.0,
        nic_bytes_per_s=1e9,
        tail=np.array([a for a, _, _ in ways]),
        head=np.array([b for _, b, _ in ways]),
        latency_s=np.full(len(ways), LINK_S),
        bytes_per_s=np.full(len(ways), 1e6),
        flow=np.array([flow for _, _, flow in ways]),
        order=np.zeros(len(ways), np.int64),
    )


def online(cluster: Placed, prompts: list[int], answers: list[int], router: int = IWRR) -> Run:
    work = Work(np.zeros(len(prompts)) + 1.0, np.array(prompts), np.array(answers))
    return run(cluster, work, router=router, online=True, from_s=0.0, until_s=1000.0)


def test_one_request_takes_the_time_of_its_layers_and_links() -> None:
    two = placed([(0, 3), (3, 4)], [(2, 0, 5.0), (0, 1, 5.0), (1, 3, 5.0)])
    found = online(two, [50], [2])
    copied = ACTIVATION * GATHER_S
    wires = 3 * LINK_S + (10 + 10 + 1010) / 1e6
    assert found.prompt_s == pytest.approx(
        [4 * LAYER_S + 3 * LINK_S + 50 * (1030 / 1e6 + 2 * copied)]
    )
    assert found.decode_s == pytest.approx([4 * TOKEN_S + wires + 2 * copied] * 2)
    assert found.tokens_per_s == pytest.approx(2 / 1000)
    assert (found.ended, found.overflows, found.waited) == (1, 0, 0)


def test_a_batch_has_one_prompt_and_a_link_one_message() -> None:
    one = placed([(0, 2)], [(1, 0, 5.0), (0, 2, 5.0)])
    found = online(one, [50, 50], [1, 1])
    sent = 50 * 10 / 1e6
    # The second is copied with what is there when the first layer begins: it arrives while that runs.
    first = sent + LINK_S + 50 * ACTIVATION * GATHER_S + 2 * LAYER_S + sent + LINK_S
    assert found.prompt_s[0] == pytest.approx(first)
    # Layers take turns: first the second's first layer waits for none of the first's second one.
    assert found.prompt_s[1] > first + LAYER_S
    assert found.ended == 2


def test_requests_are_shared_by_flow() -> None:
    ways = [(2, 0, 3.0), (2, 1, 1.0), (0, 3, 3.0), (1, 3, 1.0)]
    cluster = placed([(0, 1), (0, 1)], ways)
    cluster.prompt_s[1, 1:] = 5.0
    # Far apart, so that each takes its own time: which node it was shows in that.
    work = Work(np.arange(12, dtype=np.float64) * 20.0, np.full(12, 10), np.full(12, 1))
    for router in (IWRR, OURS):
        found = run(cluster, work, router=router, online=True, from_s=0.0, until_s=1000.0)
        assert int((found.prompt_s > 5.0).sum()) == 3


def test_a_way_with_little_flow_is_not_used() -> None:
    # Node 1 would overflow at once; with 4 % of the flow Helix's scheduler never goes there.
    ways = [(2, 0, 96.0), (2, 1, 4.0), (0, 3, 96.0), (1, 3, 4.0)]
    tight = replace(placed([(0, 1), (0, 1)], ways), kv_entries=np.array([1e6, 1.0]))
    assert online(tight, [10] * 50, [1] * 50).overflows == 0


def test_look_ahead_shuts_what_ends_before_a_full_node() -> None:
    # 0 leads to 2, which holds no request, 1 to 3; the plain router walks into the dead end.
    ways = [(4, 0, 2.0), (4, 1, 1.0), (0, 2, 2.0), (1, 3, 1.0), (2, 5, 2.0), (3, 5, 1.0)]
    cluster = placed([(0, 1), (0, 1), (1, 2), (1, 2)], ways)
    cluster = replace(cluster, kv_entries=np.array([1e6, 1e6, 100.0, 1e6]))
    waiting = Work(np.zeros(40), np.full(40, 10), np.full(40, 1))
    plain = run(cluster, waiting, router=IWRR, from_s=0.0, until_s=600.0)
    ours = run(cluster, waiting, router=OURS, from_s=0.0, until_s=600.0)
    assert plain.turned_away > 0
    assert ours.turned_away == 0
    assert ours.ended == 40 > plain.ended


def test_what_finds_no_way_waits_online() -> None:
    one = placed([(0, 1)], [(1, 0, 1.0), (0, 2, 1.0)], entries=200.0)
    found = online(one, [10, 10], [3, 3])
    assert found.waited == 1
    assert found.ended == 2
    assert found.prompt_s[1] > found.prompt_s[0] + found.decode_s.sum() / 2


@pytest.mark.skipif(not (DATA / "helix").is_dir(), reason="no data of Helix here")
@pytest.mark.parametrize(
    ("cluster", "published"), [("3cluster24", 97.98), ("single24", 252.08), ("cluster42", 645.57)]
)
def test_published_figures(cluster: str, published: float) -> None:
    pytest.importorskip("networkx")
    from benchmarks.placement.helix_judge import CASES, MODEL, Side
    from benchmarks.placement.judged import Judge

    case = next(case for case in CASES if case.cluster == cluster)
    judge = Judge.read(DATA, cluster, MODEL)
    ranges = judge.published(case.solution)
    flows = judge.with_largest_flow(ranges, judge.kept_links(case.solution), 4)
    sides = (Side(placed, judge.begin_s(ranges), IWRR) for placed in flows)
    # Helix's own code finds one of several largest flows, by Python's hash seed.
    assert any(abs(s.offline(DATA, 0).tokens_per_s - published) < 0.01 for s in sides)
