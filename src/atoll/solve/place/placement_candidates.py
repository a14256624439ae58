"""Placements for goals that the search for the largest flow does not see: candidates, then polishing.

Short ranges make deep pipelines, which flow well and answer slowly. So besides the largest flow, candidates
are the largest flows of clusters whose nodes carry nothing with few layers, or what they carry in pipelines
of so many hops, and the simple rules. The best of them are annealed by the goal itself (`polish`): where that
takes long first by a quick value of it, which is about right.

All work is counted, so the same instance gives the same placements however long it takes; a deadline only
ends it early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from atoll.core.rng import stream
from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.latency import MAX_STAGES, rate_table
from atoll.solve.place.placement_polish import Value, polish

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the most layers any node holds, below which nodes that could hold more carry nothing."""
_EACH = 8
"""Candidates of each search."""
_FEW_EVALUATIONS = 200
"""Evaluations for each node up to which searches end at a rough bound: proving a close one takes longer."""
_POLISHED = 3
"""How many of the best candidates are polished; then the best of all is once more."""
_PROMISING = 0.88
"""Share of the best so far that the quick value of a placement must have to be scored."""

Log = Callable[[float, float, float], None]
Score = Callable[[FlowInstance, Placement], Flows]


@dataclass(frozen=True)
class CandidateWork:
    """How much is done for the candidates of one instance: evaluations by search, steps by polishing.

    `steps` go by the quick value where there is one, and `slow_steps` by the goal itself.
    """

    evaluations: int
    steps: int
    slow_steps: int = 0


def with_longer_ranges(instance: FlowInstance, min_layers: int) -> FlowInstance:
    """Return the instance where nodes carry nothing with fewer than `min_layers`, or than they can hold.

    Searching on it gives pipelines with fewer hops.
    """
    rate = instance.rate.copy()
    for i, max_layers in enumerate(instance.max_layers):
        rate[i, 1 : min(min_layers, int(max_layers))] = 0.0
    return replace(instance, rate=rate)


def by_range_length(instance: FlowInstance) -> list[FlowInstance]:
    """Return the instance with ever longer ranges only."""
    longest = int(instance.max_layers.max())
    lengths = sorted({1, *(max(1, round(share * longest)) for share in _SHARES)})
    return [with_longer_ranges(instance, min_length) for min_length in lengths]


def by_stage_count(instance: FlowInstance) -> list[FlowInstance]:
    """Return the instance for pipelines of 1, 2, 4, ... hops: what nodes carry there within the promise."""
    return list(_by_stage_count(instance))


def _by_stage_count(instance: FlowInstance) -> Iterator[FlowInstance]:
    longest = min(int(instance.max_layers.max(initial=0)), instance.layers)
    # Fewer stages cannot hold all layers, even with the longest ranges.
    stages = -(-instance.layers // max(1, longest))
    tried = 0
    while stages <= min(MAX_STAGES, instance.size, instance.layers) and tried < len(_SHARES) + 1:
        rate = rate_table(instance, stages)
        if rate.max(initial=0.0) > 0.0:
            # Ranges of a stage or more keep ways to so many hops.
            yield with_longer_ranges(replace(instance, rate=rate), -(-instance.layers // stages))
        tried += 1
        # Small numbers one by one, larger ones in leaps, so that few instances are searched.
        stages = stages + 1 if stages < 4 else round(stages * 1.5)


def best_candidates(
    instance: FlowInstance,
    score: Score,
    starts: Sequence[Placement],
    searched: Sequence[FlowInstance],
    *,
    work: CandidateWork,
    deadline: Deadline,
    seed: int,
    workers: int = 1,
    bound: float,
    quick: Value | None = None,
    log: Log | None = None,
    limit: int = 1,
    done: Counter[str] | None = None,
) -> list[tuple[Placement, Flows]]:
    """Return the placements whose flows by `score` carry the most, best first, at most `limit` of them.

    None of them where nothing carries anything. `searched` are instances whose largest flows are candidates.
    `quick` values (start, end) about as `score` does, in less time; without it `score` is used throughout.
    `done` counts searches, their evaluations, and polished placements.
    """
    from atoll.solve.place.bound.bounds import upper_bound
    from atoll.solve.place.search.flow_search import search_many

    done = Counter() if done is None else done
    few = work.evaluations < _FEW_EVALUATIONS * instance.size
    seen = _Scored(instance, score, deadline, bound, log)

    def value(start: Ints, end: Ints) -> float:
        return score(instance, Placement(start, end)).value

    # The starts are scored first, so that there is an answer however little time is left.
    for placement in starts:
        seen.look(placement)
    for other in searched:
        if deadline.is_over():
            break
        many = search_many(
            other,
            candidates=_EACH,
            seconds=deadline.limit(),
            evaluations=max(1, work.evaluations // len(searched)),
            seed=seed,
            workers=workers,
            start=starts,
            # With few evaluations the rough bound will do: a close one would take longer than the search.
            bound=upper_bound(other, tight=False).value if few else None,
        )
        deadline.missed |= many[0].cut_short
        done.update(searches=1, evaluations=many[0].evaluations)
        for result in many:
            if not deadline.is_over():
                seen.look(result.placement)
    phases: list[tuple[str, Value, int, int]] = [
        ("polish", quick or value, work.steps, _POLISHED),
    ]
    if quick is not None:
        phases.append(("polish by score", _screened(quick, value, seen), work.slow_steps, 1))
    for name, given, all_steps, leading in phases:
        first = seen.ranked()[:leading]
        for number, steps in enumerate(_polishing(len(first), all_steps)):
            if deadline.is_over() or not steps:
                break
            # In turn, then once more from the best of all.
            placement = first[number][0] if number < len(first) else seen.ranked()[0][0]
            random = stream(seed, name, str(number))
            better, _ = polish(
                instance, placement, given, steps=steps, deadline=deadline, random=random
            )
            done.update(polished=1)
            seen.look(better)
    return seen.ranked()[:limit]


@dataclass
class _Scored:
    """Placements that carry something, each with its flow, once each."""

    instance: FlowInstance
    score: Score
    deadline: Deadline
    bound: float
    log: Log | None
    found: dict[bytes, tuple[Placement, Flows]] = field(default_factory=dict)
    best: float = 0.0

    def look(self, placement: Placement) -> None:
        """Score a placement that was not seen before."""
        key = placement.start.tobytes() + placement.end.tobytes()
        if key in self.found:
            return
        flows = self.score(self.instance, placement)
        self.found[key] = (placement, flows)
        if flows.value > self.best:
            self.best = flows.value
            if self.log is not None:
                self.log(self.deadline.spent, flows.value, self.bound)

    def ranked(self) -> list[tuple[Placement, Flows]]:
        """Return those with any flow, the best first, the one found first among equals."""
        some = [entry for entry in self.found.values() if entry[1].value > 0]
        return sorted(some, key=lambda entry: -entry[1].value)


def _screened(quick: Value, value: Value, seen: _Scored) -> Value:
    """Return the value that is the quick one where that shows that a placement is none of the best."""

    def screened(start: Ints, end: Ints) -> float:
        first = quick(start, end)
        return first if first < _PROMISING * seen.best else max(first, value(start, end))

    return screened


def _polishing(turns: int, steps: int) -> list[int]:
    """Steps for each of the best candidates, and for the best of all afterwards."""
    # Half of the steps for candidates in turn, half for the best of them.
    return [*[steps // (2 * turns)] * turns, steps // 2] if turns else []
