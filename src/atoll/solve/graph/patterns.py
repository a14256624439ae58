"""Any-to-any planning with topology: traffic between machines is bounded by their NICs.

The program without topology is a relaxation: if its answer can be laid into machines whose NICs hold, it is
the best with topology too. If not, a *pattern* is a machine with its executors, and the master program
counts machines by pattern, with the flows of each (`boxes`). Few patterns are all listed, so that the answer
is exact. Of many, those that pay are generated: the prices of the linear relaxation make a knapsack with
flows for one machine (a small integer program), until none pays. Then an integer program over those;
the bound is that of the relaxation with topology, or of the program without if that is better.

Executor types on several slices are left out of patterns: their slices may be in different machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from atoll.plan.plan import OfferKey
from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.graph.boxes import LaidMachine, Pattern, make_block, pack_boxes
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_types import GraphAnswer, GraphProgram, PlacedExecutors
from atoll.solve.graph.pattern_master import OpenMachine, PatternMaster, make_entries, slice_sizes
from atoll.solve.graph.presolve import undominated
from atoll.solve.lp import LinearProgram, MipResult

_ALL_PATTERNS = 150
"""Patterns of an offer up to which all are listed."""
_MAX_OPEN = 500
"""Numbers of executors, by type and machine, up to which machines are left open in one integer program."""
_ITERATIONS = 60_000
_ROUNDS = 60
"""Rounds of pricing."""
_PAYS = 1e-6
"""Reduced cost below which a pattern is worth adding."""
_SLACK = 1e-8
_WHOLE = 1e-9
_TOLERANCE = 1e-7
_MOMENT_S = 2.0
"""Seconds that an answer may take when time is up, on a busy machine."""

HOLDS = "NICs hold: the answer is the best with topology too"
BINDS = "NICs bind: machines were planned by pattern"
SPLIT = "executors on several slices were left out of machines planned by pattern"


def solve_with_topology(
    program: GraphProgram,
    *,
    gap: float = 1e-4,
    work: float = 1.0,
    deadline_s: float = math.inf,
    free: tuple[GraphProgram, GraphAnswer] | None = None,
    exact: bool = True,
) -> tuple[GraphAnswer, tuple[LaidMachine, ...]]:
    """Return the best answer whose traffic the NICs carry, and its machines; gap is relative.

    The answer's `reasons` say whether NICs bind. `free` is a program that allows all that this one does, with
    the same executors, and its answer: what is proven there holds here. Without one it is the program itself,
    its machines not told apart. Where this one is not `exact` nothing else is proven.
    """
    end = Deadline(deadline_s)
    if free is None:
        # As if NICs had no limit first: where they carry its traffic, that answer is the best of all.
        free = program, solve_program(program, gap=gap, work=work, deadline_s=deadline_s)
    wide, first = free
    if first.status == "infeasible" or not first.machines:
        return first, ()
    laid = pack_boxes(wide, first)
    if all(len(slice_sizes(program, e)) == 1 for box in laid for e, _, _ in box.executors):
        routed = _route(program, first, laid)
        if routed is not None:
            answer, boxes = routed
            return replace(answer, reasons=(*first.reasons, HOLDS)), boxes
    elif all(m.nic_bytes_per_s == math.inf for m in program.machines):
        return replace(first, reasons=(*first.reasons, HOLDS)), laid
    return _PatternSearch(program, first, laid, gap, work, end, exact=exact).solve()


def _route(
    program: GraphProgram, answer: GraphAnswer, laid: tuple[LaidMachine, ...]
) -> tuple[GraphAnswer, tuple[LaidMachine, ...]] | None:
    """Return the answer with flows between these machines that their NICs carry, None where they do not."""
    scale = answer.share if program.goal == "most" else 1.0
    master = PatternMaster(program, scale)
    offers = {machine.key: o for o, machine in enumerate(program.machines)}
    patterns: dict[Pattern, list[LaidMachine]] = {}
    for box in laid:
        counts: dict[int, int] = {}
        for e, _, n in box.executors:
            counts[e] = counts.get(e, 0) + n
        patterns.setdefault(Pattern(offers[box.offer], tuple(sorted(counts.items()))), []).append(
            box
        )
    for pattern in patterns:
        master.add_pattern(pattern)
    columns = np.array(master.count_columns, np.int64)
    numbers = np.array([float(len(boxes)) for boxes in patterns.values()])
    # The machines are given: only flows are free.
    master.lp.set_bounds(columns, numbers, numbers)
    master.seek_share()
    result = master.lp.solve_mip(time_limit_s=math.inf, gap=0.0)
    level = 1.0 if program.goal == "most" else answer.share
    if result.values is None or -result.objective < level * (1.0 - _SLACK):
        return None
    values = master.min_traffic(level)
    if values is None:
        values = result.values
    found = master.answer(values, answer)
    boxes = master.boxes(values, [list(each) for each in patterns.values()])
    # Machines and money are those of the answer, whose flows alone are new.
    kept = replace(
        found,
        placed=answer.placed,
        machines=answer.machines,
        usd_per_hour=answer.usd_per_hour,
        init_usd=answer.init_usd,
    )
    return kept, boxes


class _PatternSearch:
    """The search by patterns where NICs bind."""

    def __init__(
        self,
        program: GraphProgram,
        free: GraphAnswer,
        laid: tuple[LaidMachine, ...],
        gap: float,
        work: float,
        end: Deadline,
        *,
        exact: bool,
    ) -> None:
        self.program = program
        self.free = free
        self.laid = laid
        self.end = end
        self.late = False
        self.gap = gap
        self.iterations = max(2_000, int(_ITERATIONS * work))
        self.nodes = 0
        self.spent = 0
        # The multiple proven without topology is one that nothing exceeds: shares are at most 1.
        scale = free.bound if program.goal == "most" else 1.0
        self.master = PatternMaster(program, scale)
        self.types = self._list_types()
        self.split = any(len(slice_sizes(program, e)) > 1 for e in undominated(program))
        # What is left out may be better than all that is there.
        self.loose = self.split or not exact
        self.open = self._fill()
        self.complete = not self.open

    def _list_types(self) -> dict[int, list[int]]:
        """Return by offer the executor types on one slice of it."""
        keep = sorted({*undominated(self.program), *(s.executor for s in self.program.standing)})
        types: dict[int, list[int]] = {}
        for o, machine in enumerate(self.program.machines):
            kinds = {f"{machine.gpu}:{size}" for size in machine.sizes}
            types[o] = [
                e
                for e in keep
                if len(slice_sizes(self.program, e)) == 1
                and {kind for kind, n in self.program.executors[e].uses if n} <= kinds
            ]
        return types

    def _fill(self) -> list[int]:
        """List all patterns of offers that have few; return the others."""
        many: list[int] = []
        for o, machine in enumerate(self.program.machines):
            if machine.available <= 0 or not self.types[o]:
                continue
            some = list(islice(self._multisets(self.types[o], machine.gpus), _ALL_PATTERNS + 1))
            # Too many to list: then they are found by pricing.
            if len(some) > _ALL_PATTERNS:
                many.append(o)
                continue
            for counts in some:
                self.master.add_pattern(Pattern(o, counts))
        return many

    def _multisets(self, types: list[int], gpus: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """List executors that fit one machine; only full machines where more executors never hurt."""
        sizes = [slice_sizes(self.program, e)[0] for e in types]
        # Starts cost, or GPUs in use count: then a machine may be better off with fewer executors.
        free = self.program.init_penalty > 0.0 or self.program.spot_share is not None

        def extend(i: int, left: int) -> Iterator[tuple[tuple[int, int], ...]]:
            if i == len(types):
                if free or left < min(sizes):
                    yield ()
                return
            for n in range(left // sizes[i] + 1):
                for rest in extend(i + 1, left - n * sizes[i]):
                    yield (((types[i], n), *rest) if n else rest)

        return (counts for counts in extend(0, gpus) if counts)

    # ---------------------------------------------------------------- pricing

    def generate(self) -> float:
        """Take in patterns that pay until none does; return the bound of the relaxation."""
        master, bound = self.master, -math.inf
        for _ in range(_ROUNDS):
            result = master.lp.solve()
            self.spent += result.iterations
            if result.status != "optimal":
                return -math.inf
            if self.complete:
                return result.objective
            bound, found = result.objective, []
            for o in self.open:
                machine = self.program.machines[o]
                reduced, pattern = self._price(o, result.duals)
                # Every machine of the offer could gain so much: with that taken off, the bound
                # holds for all patterns.
                bound += min(0.0, reduced) * machine.available
                if reduced < -_PAYS and pattern not in master.patterns:
                    found.append(pattern)
            if not found:
                return bound
            for pattern in found:
                master.add_pattern(pattern)
            # Columns that are new get their price with the goal.
            self._goal()
            if self.end.passed:
                self.late = True
                break
        return bound

    def _price(self, o: int, duals: Floats) -> tuple[float, Pattern]:
        """Return the machine of an offer with the least reduced cost: a knapsack with flows."""
        master, machine = self.master, self.program.machines[o]
        types = self.types[o]
        block = make_block(self.program, master.routes, machine, types, master.scale)

        def worth(entries: list[tuple[int, float]]) -> float:
            return sum(float(duals[row]) * value for row, value in entries)

        base = worth(master.price_entries(o, {}))
        lp = LinearProgram(0)
        place = {e: i for i, e in enumerate(types)}
        pairs: dict[tuple[str, int, tuple[str, str]], int] = {}
        for flow in block.k:
            for side, i in (("first", flow.first), ("second", flow.second)):
                pairs.setdefault((side, i, flow.edge), len(types) + 4 + len(pairs))
        rows = len(types) + 4 + len(pairs)
        lower = np.zeros(rows)
        lower[len(types)] = -float(machine.gpus)
        lower[len(types) + 1 : len(types) + 4] = -1.0
        lp.add_rows(lower, np.full(rows, math.inf), make_entries([], rows))
        cost: list[float] = []
        upper: list[float] = []
        entries: list[tuple[int, int, float]] = []
        for i, e in enumerate(types):
            size = slice_sizes(self.program, e)[0]
            cost.append(base - worth(master.price_entries(o, {e: 1})))
            upper.append(float(machine.gpus // size))
            entries += [(i, i, 1.0), (i, len(types), -float(size))]
        for i, z in enumerate(block.z):
            at = len(cost)
            linked = [(master.need_row[z.route, z.part], 1.0)]
            linked += master.chain_entries(z.route, z.part, z.latency_s)
            cost.append(-worth(linked))
            upper.append(1.0)
            entries.append((at, place[z.executor], -z.load))
            entries.append((at, len(types) + 1, -block.out.get(("z", i), 0.0)))
            entries.append((at, len(types) + 2, -block.into.get(("z", i), 0.0)))
            entries += [(at, row, 1.0) for (_, which, _), row in pairs.items() if which == i]
        for i, flow in enumerate(block.k):
            at = len(cost)
            cost.append(-worth(master.pair_entries(block, i)))
            upper.append(1.0)
            entries.append((at, pairs["first", flow.first, flow.edge], -1.0))
            entries.append((at, pairs["second", flow.second, flow.edge], -1.0))
            entries.append((at, len(types) + 1, -block.out["k", i]))
            entries.append((at, len(types) + 2, -block.into["k", i]))
            entries.append((at, len(types) + 3, -block.inner.get(i, 0.0)))
        lp.add_columns(
            np.array(cost), np.zeros(len(cost)), np.array(upper), make_entries(entries, len(cost))
        )
        lp.set_integer(np.arange(len(types)))
        result = lp.solve_mip(
            time_limit_s=math.inf, gap=1e-6, iteration_limit=self.iterations, tolerance=_TOLERANCE
        )
        self.spent += result.iterations
        counts: tuple[tuple[int, int], ...] = ()
        if result.values is not None:
            number = np.rint(result.values[: len(types)]).astype(np.int64)
            counts = tuple((e, int(n)) for e, n in zip(types, number, strict=True) if n)
        own = master.machine_cost(o) * self._money
        # By what is proven, not by what was found: the bound must hold where the solve ended early, too.
        return own - base + min(0.0, result.bound), Pattern(o, counts)

    # ---------------------------------------------------------------- phases

    def _goal(self) -> None:
        if self._money:
            self.master.seek_cost(self._level)
        else:
            self.master.seek_share()

    def _solve_whole(self, master: PatternMaster, whole: Sequence[int]) -> MipResult:
        """Solve a program with these columns in whole numbers, and count the work."""
        master.lp.set_integer(np.array(whole, np.int64))
        result = master.lp.solve_mip(
            time_limit_s=max(_MOMENT_S, self.end.left),
            gap=0.5 * self.gap,
            iteration_limit=self.iterations,
            tolerance=_TOLERANCE,
        )
        self.late = self.late or result.timed_out
        self.nodes += result.nodes
        self.spent += result.iterations
        return result

    def _phase(self, money: float, level: float) -> tuple[MipResult, float]:
        """Return the integer solution for a goal, and a bound over all patterns."""
        self._money, self._level = money, level
        self._goal()
        floor = self.generate()
        master = self.master
        result = self._solve_whole(master, [*master.count_columns, *master.kept_columns])
        return result, max(floor, result.bound) if self.complete and not self.loose else floor

    def solve(self) -> tuple[GraphAnswer, tuple[LaidMachine, ...]]:
        """Return the best answer by patterns; its bound is never below that without topology."""
        program, free, master = self.program, self.free, self.master
        if not self.complete:
            for box in self.laid:
                self._add_laid(box)
        shares, share_floor = self._phase(0.0, 0.0)
        reasons = (*free.reasons, BINDS, *((SPLIT,) if self.split else ()))
        level = 0.0 if shares.values is None else min(1.0, -shares.objective)
        max_share = free.share_bound / master.scale
        share_bound = max_share if self.loose else min(max_share, max(level, -share_floor))
        if level <= _SLACK or (
            program.goal == "cost" and program.shortage == "fail" and level < 1.0 - _SLACK
        ):
            nothing = replace(
                free,
                status="infeasible",
                placed=(),
                machines={},
                flows=(),
                routes={},
                split={},
                share=0.0,
                share_bound=share_bound * master.scale,
                reasons=reasons,
            )
            return nothing, ()
        cheap, floor = self._phase(1.0, level * (1.0 - _SLACK))
        values = cheap.values if cheap.values is not None else shares.values
        assert values is not None
        chosen = self._numbers(master, values)
        if self.open:
            chosen, floor = self._leave_open(chosen, level * (1.0 - _SLACK), floor)
        answer, boxes = self._finish(chosen)
        share = float(master.weights @ np.array(self._shares))
        # A bound without topology is for its own share: it holds here only if that is no larger.
        known = free.bound if program.goal == "cost" and free.share <= share + _SLACK else 0.0
        bound = max(known, 0.0 if self.loose else floor * master.money)
        cost = answer.usd_per_hour + answer.init_usd
        bound = min(bound, cost)
        wide = share_bound - share <= self.gap * share_bound + 1e-7
        tight = cost - bound <= self.gap * cost + 1e-7
        answer = replace(
            answer,
            share=share * master.scale,
            share_bound=max(share, share_bound) * master.scale,
            objective=cost,
            bound=bound,
            status="optimal" if wide and tight else "feasible",
            nodes=free.nodes + self.nodes,
            iterations=free.iterations + self.spent,
            reasons=reasons,
            cut_short=free.cut_short or self.late,
        )
        if program.goal == "most":
            answer = replace(
                answer,
                objective=answer.share,
                bound=answer.share_bound,
                status="optimal" if wide else "feasible",
            )
        elif share < 1.0 - 1e-6:
            answer = replace(answer, status="partial")
        return answer, boxes

    def _add_laid(self, box: LaidMachine) -> None:
        offers = [machine.key for machine in self.program.machines]
        counts: dict[int, int] = {}
        for e, _, n in box.executors:
            counts[e] = counts.get(e, 0) + n
        o = offers.index(box.offer)
        pattern = Pattern(o, tuple(sorted(counts.items())))
        if pattern not in self.master.patterns and set(counts) <= set(self.types[o]):
            self.master.add_pattern(pattern)

    def _numbers(self, master: PatternMaster, values: Floats) -> Counter[Pattern]:
        """Return how many machines of each pattern a solution has."""
        return Counter(
            {
                pattern: round(values[column])
                for pattern, column in zip(master.patterns, master.count_columns, strict=True)
                if values[column] > 0.5
            }
        )

    def _leave_open(
        self, best: Counter[Pattern], level: float, floor: float
    ) -> tuple[Counter[Pattern], float]:
        """Return the cheapest machines where those of offers with many patterns are left open, and a bound.

        No answer that is better than the best so far has more of them than it costs. If they are too many,
        about as many as that has, and nothing is proven.
        """
        program = self.program
        price = [self.master.machine_cost(o) for o in range(len(program.machines))]
        cost = sum(price[pattern.offer] * n for pattern, n in best.items())
        if cost <= floor * (1.0 + 0.5 * self.gap):
            return best, floor
        rent = Counter(pattern.offer for pattern in best.elements())
        numbers = {}
        for o in self.open:
            fits = math.inf if price[o] <= 0.0 else math.floor(cost / price[o] + _WHOLE)
            numbers[o] = int(min(program.machines[o].available, fits))
        proves = sum(n * len(self.types[o]) for o, n in numbers.items()) <= _MAX_OPEN
        if not proves:
            numbers = {o: min(n, rent[o]) for o, n in numbers.items()}
            if sum(n * len(self.types[o]) for o, n in numbers.items()) > _MAX_OPEN:
                return best, floor
        master = PatternMaster(program, self.master.scale)
        for pattern in self.master.patterns:
            if pattern.offer not in self.open:
                master.add_pattern(pattern)
        machines: list[OpenMachine] = []
        for o, n in numbers.items():
            last: OpenMachine | None = None
            for _ in range(n):
                last = master.add_machine(o, self.types[o], last)
                machines.append(last)
        master.seek_cost(level)
        for one in machines:
            master.lp.set_costs(np.array([one.taken]), np.array([price[one.offer]]))
        whole = [*master.count_columns, *master.kept_columns]
        whole += [column for one in machines for column in (one.taken, *one.numbers)]
        result = self._solve_whole(master, whole)
        if proves and not self.loose:
            # With more machines than are open an answer costs no less than the best so far.
            inner = math.inf if result.status == "infeasible" else result.bound
            floor = max(floor, min(inner, cost))
        if result.values is None or result.objective >= cost * (1.0 - _WHOLE):
            return best, floor
        found = self._numbers(master, result.values)
        found.update(p for one in machines if (p := one.pattern(result.values)) is not None)
        return found, floor

    def _finish(self, numbers: Counter[Pattern]) -> tuple[GraphAnswer, tuple[LaidMachine, ...]]:
        """Return the answer with these numbers of machines, its flows made exact and its executors named."""
        program = self.program
        chosen = list(numbers)
        fixed = PatternMaster(program, self.master.scale)
        for pattern in chosen:
            fixed.add_pattern(pattern)
        count = np.array([float(numbers[pattern]) for pattern in chosen])
        fixed.lp.set_bounds(np.array(fixed.count_columns, np.int64), count, count)
        fixed.seek_share()
        result = fixed.lp.solve_mip(time_limit_s=math.inf, gap=0.0)
        assert result.values is not None
        min_traffic = fixed.min_traffic(-result.objective)
        values = result.values if min_traffic is None else min_traffic
        self._shares = [float(values[c]) for c in fixed.share_columns]
        laid: list[list[LaidMachine]] = []
        slots: dict[int, int] = {}
        for k, pattern in enumerate(chosen):
            number = numbers[pattern]
            inside = self._used(fixed, k, number, values)
            key = program.machines[pattern.offer].key
            first = slots.get(pattern.offer, 0)
            slots[pattern.offer] = first + number
            laid.append([LaidMachine(key, first + n, inside) for n in range(number)])
        boxes = fixed.boxes(values, laid)
        return self._account(fixed.answer(values, self.free), boxes), boxes

    def _used(
        self, fixed: PatternMaster, k: int, number: int, values: Floats
    ) -> tuple[tuple[int, str, int], ...]:
        """Return the executors in each machine of a pattern, without those that are idle in all of them."""
        load: dict[int, float] = {}
        for z, column in zip(fixed.blocks[k].z, fixed.z_columns[k], strict=True):
            load[z.executor] = load.get(z.executor, 0.0) + max(0.0, float(values[column])) * z.load
        inside = []
        for e, n in fixed.patterns[k].executors:
            if self.program.spot_share is None:
                n = min(n, math.ceil(load.get(e, 0.0) / number - 100 * _WHOLE))
            if n:
                inside.append((e, self.program.executors[e].uses[0][0], n))
        return tuple(inside)

    def _account(self, answer: GraphAnswer, boxes: tuple[LaidMachine, ...]) -> GraphAnswer:
        """Return the answer with the executors and machines of boxes, and what they cost."""
        program = self.program
        offers = {machine.key: machine for machine in program.machines}
        slices: dict[tuple[int, str], dict[tuple[OfferKey, str], int]] = {}
        machines: dict[OfferKey, int] = {}
        for box in boxes:
            machines[box.offer] = machines.get(box.offer, 0) + 1
            for e, kind, n in box.executors:
                at = slices.setdefault((e, box.offer[0]), {})
                at[box.offer, kind] = at.get((box.offer, kind), 0) + n
        standing: dict[tuple[int, OfferKey], int] = {}
        for item in program.standing:
            if len(item.offers) == 1:
                one = (item.executor, item.offers[0])
                standing[one] = standing.get(one, 0) + item.count
        placed, start = [], 0.0
        for (e, region), taken in sorted(slices.items()):
            kept = 0
            for (key, kind), n in taken.items():
                stay = min(n, standing.get((e, key), 0))
                kept += stay
                share = int(kind.rsplit(":", 1)[1]) / offers[key].gpus
                start += (n - stay) * share * offers[key].usd_per_hour
            total = sum(taken.values())
            each = tuple((key, kind, n) for (key, kind), n in sorted(taken.items()))
            placed.append(PlacedExecutors(e, region, total, kept, each))
        return replace(
            answer,
            placed=tuple(placed),
            machines=dict(sorted(machines.items())),
            usd_per_hour=math.fsum(offers[key].usd_per_hour * n for key, n in machines.items()),
            init_usd=program.init_penalty * start,
        )
