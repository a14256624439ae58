"""Which rows go into the next batch."""

from __future__ import annotations

from atoll.engine.batcher import (
    BatchUnit,
    Chunk,
    DecodeGroups,
    PromptOrder,
    ResidentSequence,
    pick,
)
from atoll.engine.kv import BlockTable
from atoll.engine.messages import Hop, OpenBody

FIRST = Hop(node="a", endpoint="mem://a", start=0, end=2)
SECOND = Hop(node="b", endpoint="mem://b", start=2, end=4)


def resident(seq: int, known: int, ran: int, prompt: int, *, hop: int = 0) -> ResidentSequence:
    body = OpenBody(
        seq=seq,
        epoch=0,
        hop=hop,
        route=(FIRST, SECOND),
        prompt_length=prompt,
        max_length=99,
        arrival=seq,
        reply_to="mem://s",
    )
    return ResidentSequence(body, list(range(known)), BlockTable(b"", length=ran))


def shape(units: list[BatchUnit]) -> list[tuple[int, int, int, bool]]:
    return [(u.resident.body.seq, u.position, u.count, u.sample) for u in units]


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
    assert pick([waiting, missing], 8, 8, DecodeGroups(1), 0.0) == []


def test_chunks_from_another_hop_are_never_cut() -> None:
    later = resident(1, 40, 0, 40, hop=1)
    later.queue.append(Chunk(0, 40, True, None))
    assert shape(pick([later], 8, 8, DecodeGroups(1), 0.0)) == [(1, 0, 40, True)]
    early = resident(0, 9, 8, 8)
    assert shape(pick([later, early], 8, 8, DecodeGroups(1), 0.0)) == [(0, 8, 1, True)]


def test_decodes_wait_for_the_group_under_way_and_then_go_together() -> None:
    in_flight = DecodeGroups(1, patience_s=1.0)
    flying, ready = resident(1, 9, 8, 8), resident(2, 9, 8, 8)
    in_flight.start([flying], 0.0)
    flying.table.length = 9
    assert pick([flying, ready], 8, 8, in_flight, 0.1) == []
    flying.know(9, 5)
    in_flight.land(flying, 0.2)
    assert shape(pick([flying, ready], 8, 8, in_flight, 0.2)) == [(1, 9, 1, True), (2, 8, 1, True)]


def test_prefill_does_not_wait_for_a_group() -> None:
    in_flight = DecodeGroups(1)
    in_flight.start([resident(1, 9, 8, 8)], 0.0)
    assert shape(pick([resident(2, 4, 0, 4)], 8, 8, in_flight, 0.0)) == [(2, 0, 4, True)]


def test_a_group_that_is_much_too_late_is_not_waited_for() -> None:
    in_flight = DecodeGroups(1, patience_s=1.0)
    in_flight.start([resident(1, 9, 8, 8)], 0.0)
    assert not in_flight.may_start(0.9)
    assert in_flight.may_start(1.1)
    assert in_flight.count == 0


def test_prompts_that_can_still_be_in_time_go_first_the_shortest_ahead() -> None:
    # 10 ms a token: of 2 s promised, 1 s is left for those that came at 0, too little for 150 tokens.
    order = PromptOrder(promise_s=2.0)
    order.learn([BatchUnit(resident(9, 100, 0, 100), 0, 100, True)], 1.0)
    late, long, short = (resident(i, n, 0, n) for i, n in enumerate((150, 90, 20)))
    begun, again = resident(3, 80, 40, 80), resident(4, 60, 0, 50)
    begun.fresh = False

    def turns(now_s: float) -> list[int]:
        held = [late, long, short, begun, again]
        units = pick(held, 1000, 1000, DecodeGroups(1), now_s, order)
        return [unit.resident.body.seq for unit in units]

    assert turns(1.0) == [3, 4, 2, 1, 0]
    # After ten times the promise the oldest goes first.
    assert turns(20.5) == [3, 4, 0, 1, 2]


def test_without_a_promise_the_oldest_prompt_goes_first() -> None:
    held = [resident(2, 5, 0, 5), resident(0, 50, 0, 50), resident(1, 20, 0, 20)]
    units = pick(held, 100, 100, DecodeGroups(1), 100.0)
    assert [unit.resident.body.seq for unit in units] == [0, 1, 2]
