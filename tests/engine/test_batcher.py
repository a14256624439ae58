"""Which rows go into the next batch."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.engine.batcher import (
    BatchUnit,
    Chunk,
    DecodeGroups,
    Picked,
    PromptOrder,
    ResidentSequence,
    pick,
)
from atoll.engine.engine_messages import Hop, OpenBody
from atoll.engine.kv import BlockTable
from atoll.engine.rows import RowSlice
from atoll.routing.decisions import urgency
from atoll.sim.sim_options import ORDERS, SimOptions

FIRST = Hop(node="a", endpoint="mem://a", start=0, end=2)
SECOND = Hop(node="b", endpoint="mem://b", start=2, end=4)
BOTH = (FIRST, SECOND)


def resident(
    seq: int, known: int, ran: int, prompt: int, *, hop: int = 0, route: tuple[Hop, ...] = BOTH
) -> ResidentSequence:
    body = OpenBody(
        seq=seq,
        epoch=0,
        hop=hop,
        route=route,
        prompt_length=prompt,
        max_length=99,
        arrival=seq,
        reply_to="mem://s",
    )
    return ResidentSequence(body, list(range(known)), BlockTable(b"", length=ran))


def shape(picked: Picked) -> list[tuple[int, int, int, bool]]:
    return [(u.resident.body.seq, u.position, u.count, u.sample) for u in picked.units]


def test_decodes_go_first_then_chunks_oldest_first_within_the_budget() -> None:
    held = [resident(3, 20, 0, 20), resident(1, 30, 5, 30), resident(2, 9, 8, 8)]
    units = pick(held, budget=12, chunk=8, in_flight=DecodeGroups(1), now_s=0.0)
    assert shape(units) == [(2, 8, 1, True), (1, 5, 8, False), (3, 0, 3, False)]


def test_the_last_chunk_asks_for_a_token() -> None:
    units = pick([resident(1, 10, 4, 10)], budget=64, chunk=8, in_flight=DecodeGroups(1), now_s=0.0)
    assert shape(units) == [(1, 4, 6, True)]


def test_who_waits_is_left_out() -> None:
    waiting, missing = resident(1, 4, 0, 4), resident(2, 4, 0, 4)
    waiting.waiting, missing.kv_missing = True, 3
    assert pick([waiting, missing], 8, 8, DecodeGroups(1), 0.0) == ([], False)


def test_chunks_from_another_hop_are_never_cut() -> None:
    later = resident(1, 40, 0, 40, hop=1)
    later.queue.append(Chunk(0, 40, True, RowSlice(None, 0, 40)))
    assert shape(pick([later], 8, 8, DecodeGroups(1), 0.0)) == [(1, 0, 40, True)]
    early = resident(0, 9, 8, 8)
    assert shape(pick([later, early], 8, 8, DecodeGroups(1), 0.0)) == [(0, 8, 1, True)]


def test_decodes_wait_for_the_group_under_way_and_then_go_together() -> None:
    in_flight = DecodeGroups(1, patience_s=1.0)
    flying, ready = resident(1, 9, 8, 8), resident(2, 9, 8, 8)
    in_flight.start([flying], 0.0)
    flying.table.length = 9
    assert pick([flying, ready], 8, 8, in_flight, 0.1) == ([], True)
    flying.know(9, 5)
    in_flight.land(flying, 0.2)
    picked = pick([flying, ready], 8, 8, in_flight, 0.2)
    # Who has waited longer goes first.
    assert shape(picked) == [(2, 8, 1, True), (1, 9, 1, True)]
    assert not picked.held_back


def test_prefill_does_not_wait_for_a_group() -> None:
    in_flight = DecodeGroups(1)
    in_flight.start([resident(1, 9, 8, 8)], 0.0)
    assert shape(pick([resident(2, 4, 0, 4)], 8, 8, in_flight, 0.0)) == [(2, 0, 4, True)]


def test_a_group_that_is_much_too_late_is_not_waited_for() -> None:
    in_flight = DecodeGroups(1, patience_s=1.0)
    in_flight.start([resident(1, 9, 8, 8)], 0.0)
    assert in_flight.room(2, 0.9) == 0
    assert in_flight.room(2, 1.1) == 2
    assert in_flight.count == 0


def test_a_late_member_does_not_count_against_the_group_that_took_its_place() -> None:
    in_flight = DecodeGroups(1, patience_s=1.0)
    late, next_one = resident(1, 9, 8, 8), resident(2, 9, 8, 8)
    in_flight.start([late], 0.0)
    assert in_flight.room(2, 2.0) == 2
    in_flight.start([next_one], 2.0)
    assert in_flight.land(late, 2.1) is None
    assert in_flight.room(2, 2.2) == 0
    assert in_flight.land(next_one, 2.5) == (1, 0.5)
    assert in_flight.room(2, 2.5) == 2


def test_a_group_takes_its_share_of_the_sequences_and_who_came_back_first_goes_first() -> None:
    """Five sequences, three groups: without turns the fifth would never leave."""
    held = [resident(seq, 9, 8, 8) for seq in range(5)]
    in_flight = DecodeGroups(3)
    left: list[int] = []
    for step in range(20):
        units = pick(held, 64, 64, in_flight, float(step)).units
        assert len(units) <= 2
        members = [unit.resident for unit in units]
        in_flight.start(members, float(step))
        for member in members:
            left.append(member.body.seq)
            member.table.length += 1
        if in_flight.count == 3 or not units:
            oldest = min((r for r in held if r.flight is not None), key=lambda r: r.flight or 0)
            for member in [r for r in held if r.flight == oldest.flight]:
                member.know(member.table.length, 5)
                in_flight.land(member, float(step))
    counts = [left.count(seq) for seq in range(5)]
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 1


@given(
    limit=st.one_of(st.none(), st.integers(1, 5)),
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_there_are_never_more_groups_than_the_limit(
    limit: int | None, count: int, seed: int
) -> None:
    random = Random(seed)
    in_flight = DecodeGroups(limit, patience_s=1e9)
    ready = [resident(seq, 9, 8, 8) for seq in range(count)]
    out: list[ResidentSequence] = []
    for step in range(60):
        room = in_flight.room(count, float(step))
        assert room == 0 or room * (limit or 1) >= count
        members, ready = ready[:room], ready[room:]
        if limit is None:
            # Free groups leave as they come, here one by one.
            members, ready = members[:1], members[1:] + ready
        in_flight.start(members, float(step))
        out += members
        flights = {member.flight for member in out}
        assert in_flight.count == len(flights) <= (limit or count)
        random.shuffle(out)
        for member in [out.pop() for _ in range(random.randrange(len(out) + 1))]:
            in_flight.land(member, float(step))
            ready.append(member)
        assert in_flight.count == len({member.flight for member in out})


def test_only_a_group_that_was_out_alone_tells_how_long_the_way_is() -> None:
    in_flight = DecodeGroups(2)
    one, two = resident(1, 9, 8, 8), resident(2, 9, 8, 8)
    in_flight.start([one], 0.0)
    in_flight.start([two], 0.5)
    assert in_flight.land(one, 1.0) is None
    in_flight.start([one], 1.1)
    assert in_flight.land(two, 1.5) is None
    assert in_flight.land(one, 1.6) is None
    in_flight.start([one, two], 2.0)
    assert in_flight.land(one, 2.5) is None
    assert in_flight.land(two, 3.0) == (2, 1.0)


def test_a_limit_may_depend_on_how_many_sequences_there_are() -> None:
    in_flight = DecodeGroups(lambda sequences: 2 if sequences > 4 else 1)
    in_flight.start([resident(1, 9, 8, 8)], 0.0)
    assert in_flight.room(4, 0.1) == 0
    assert in_flight.room(5, 0.1) == 3


def test_prompts_that_can_still_be_in_time_go_first_the_shortest_ahead() -> None:
    # 5 ms a token on each of two nodes: of 2 s promised, 1 s is left for those that came at 0, too little for
    # 150 tokens.
    order = PromptOrder(promise_s=2.0)
    order.learn([BatchUnit(resident(9, 100, 0, 100), 0, 100, True)], 0.5)
    late, long, short = (resident(i, n, 0, n) for i, n in enumerate((150, 90, 20)))
    begun, again = resident(3, 80, 40, 80), resident(4, 60, 0, 50)
    begun.fresh = False

    def turns(now_s: float) -> list[int]:
        held = [late, long, short, begun, again]
        units = pick(held, 1000, 1000, DecodeGroups(1), now_s, order).units
        return [unit.resident.body.seq for unit in units]

    assert turns(1.0) == [3, 4, 2, 1, 0]
    # After ten times the promise the oldest goes first.
    assert turns(20.5) == [3, 4, 0, 1, 2]


def test_without_a_promise_the_oldest_prompt_goes_first() -> None:
    held = [resident(2, 5, 0, 5), resident(0, 50, 0, 50), resident(1, 20, 0, 20)]
    units = pick(held, 100, 100, DecodeGroups(1), 100.0).units
    assert [unit.resident.body.seq for unit in units] == [0, 1, 2]


@given(
    st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(1, 4000)), min_size=2, max_size=8),
    st.floats(0.1, 5.0),
    st.floats(60.0, 80.0),
)
def test_prompts_go_in_the_order_that_is_simulated(
    came: list[tuple[float, int]], promise_s: float, now_s: float
) -> None:
    order = PromptOrder(promise_s)
    order.learn([BatchUnit(resident(99, 100, 0, 100), 0, 100, True)], 0.05)
    held = []
    for seq, (came_s, prompt) in enumerate(came):
        held.append(resident(seq, prompt, 0, prompt))
        held[-1].came_s = came_s

    units = pick(held, 10**6, 10**6, DecodeGroups(1), now_s, order).units

    # Two layers of four take 0.5 ms a token here, so all of them twice that.
    code = ORDERS[SimOptions().order_of("atoll")]
    keys = [urgency(code, now_s, at_s, promise_s, 0.05 / 100 * n * 2.0) for at_s, n in came]
    found = [keys[unit.resident.body.seq] for unit in units]
    assert found == pytest.approx(sorted(keys))


def test_no_more_sequences_begin_on_a_node_alone_than_may_run() -> None:
    alone = (Hop(node="a", endpoint="mem://a", start=0, end=4),)
    held = [resident(seq, 9, 8, 8, route=alone) for seq in range(2)]
    held += [resident(seq, 20, 0, 20, route=alone) for seq in range(2, 5)]
    held[0].fresh = held[1].fresh = False

    def seqs(most: int | None) -> list[int]:
        picked = pick(held, 512, 256, DecodeGroups(1), 0.0, max_sequences=most)
        return [unit.resident.body.seq for unit in picked.units]

    assert seqs(None) == [0, 1, 2, 3, 4]
    assert seqs(3) == [0, 1, 2]
    assert seqs(2) == [0, 1]
    # Those that have begun all go on, if in turns.
    assert seqs(1) == [0]
    held[2].fresh = False
    assert seqs(3) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40)), max_size=12),
    st.integers(1, 64),
    st.integers(1, 6),
)
def test_a_batch_has_no_more_rows_and_sequences_than_it_may(
    kinds: list[tuple[bool, bool, int]], budget: int, most: int
) -> None:
    held = []
    for seq, (later, decodes, size) in enumerate(kinds):
        one = resident(seq, size, 0, size, hop=int(later))
        if later:
            one.queue.append(Chunk(0, 1 if decodes else size, True, RowSlice(None, 0, 1)))
        elif decodes:
            one = resident(seq, size + 1, size, size)
        held.append(one)

    units = pick(held, budget, 8, DecodeGroups(None), 0.0, max_sequences=most).units

    assert len(units) <= most
    assert bool(units) == bool(held)
    assert len(units) <= 1 or sum(unit.count for unit in units) <= budget
