"""What the fast solver keeps on disk: found again, checked, and never mistaken for another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase, RoleId
from atoll.perf.step import Position
from atoll.plan import capacities, handover
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.fast import fast_cache, fast_templates
from atoll.solve.rent.fast.fast_cache import RoleCache, pack, unpack
from atoll.solve.templates.generate import RoleTables, equal_nodes, generate
from tests.plan.builders import catalog, problem, service
from tests.seeds import examples

SOME = examples(30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path))
    return tmp_path / "fast"


def own_fleet(**changes: object) -> Problem:
    return problem(services=(service("chat", phases="together", **changes),))


def anew(own: Problem, **options: object) -> Plan:
    """A plan of a process that has planned nothing yet."""
    forget()
    return solve(own, PlanRequest(solver="fast", catalog=catalog(), **options))  # type: ignore[arg-type]


def forget() -> None:
    """Be as a process that has planned nothing yet."""
    fast_templates._KEPT.clear()
    fast_cache._LAST.clear()
    capacities._RATES.clear()
    handover._KNOWN.clear()
    handover._ALIKE.clear()


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("worked out again")

    for name in names:
        monkeypatch.setattr(fast_templates, name, refuse)


def test_what_is_kept_is_used_and_gives_the_same_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = anew(own_fleet())
    assert len(kept(folder)) == 3  # capacities and templates of one role, and the nodes of the plan
    forbid(monkeypatch, "_make", "slowest_sources")
    monkeypatch.setattr(capacities, "_split_rates", None)
    assert anew(own_fleet()) == first
    monkeypatch.undo()
    more = anew(own_fleet(rate_per_s=own_fleet().services[0].rate_per_s * 1.1))
    assert more.status == "feasible"


def test_other_prices_need_other_templates_but_no_other_capacities(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_fleet()
    anew(own)
    offers = tuple(o.model_copy(update={"usd_per_hour": o.usd_per_hour * 1.3}) for o in own.offers)
    forbid(monkeypatch, "slowest_sources")
    anew(own.replace(offers=offers))
    assert len(kept(folder)) == 4


def test_another_promise_or_other_code_finds_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_fleet()
    anew(own)
    anew(own_fleet(tpot_s=own.services[0].tpot_s * 1.5))
    assert len(kept(folder)) == 6
    for module in (fast_templates, fast_cache):
        monkeypatch.setattr(module, "code_digest", lambda: "other sources")
    anew(own)
    assert len(kept(folder)) == 9


def test_broken_files_are_made_again(folder: Path) -> None:
    own = own_fleet()
    first = anew(own)
    before = kept(folder)
    for number, path in enumerate(before):
        data = bytearray(before[path])
        data[-9] ^= 1
        path.write_bytes(data[: len(data) // 2] if number else data)
    assert anew(own) == first
    assert kept(folder) == before


def test_without_a_cache_nothing_is_written(folder: Path) -> None:
    cached = anew(own_fleet())
    for path in kept(folder):
        path.unlink()
    assert anew(own_fleet(), effort=Effort(cached=False)) == cached
    assert not kept(folder)


def test_the_min_recently_used_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    store = RoleCache(tmp_path)
    for number in range(4):
        store.write(f"k{number}", {"x": np.arange(10.0)})
    for number in range(4):
        os.utime(store._path(f"k{number}"), (number, number))
    monkeypatch.setattr(fast_cache, "_MAX_BYTES", 2 * len(pack({"x": np.arange(10.0)})))
    store.prune()
    assert [store.read(f"k{number}") is not None for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]


@SOME
@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["<f8", "<i8", "|i1"]), st.data())
def test_arrays_come_back_and_damage_is_found(
    shape: list[int], dtype: str, data: st.DataObject
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    packed = pack({"a": array, "b": np.ones(3)})
    found = unpack(packed)
    assert found is not None
    assert found["a"].dtype == array.dtype
    assert np.array_equal(found["a"], array)
    at = data.draw(st.integers(0, len(packed) - 1))
    damaged = bytearray(packed)
    damaged[at] ^= data.draw(st.integers(1, 255))
    assert unpack(bytes(damaged)) is None
    assert unpack(packed[:at]) is None


@SOME
@given(st.integers(0, 10_000))
def test_equal_nodes_carry_what_the_search_for_templates_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, stages, most = int(rng.integers(2, 9)), int(rng.integers(1, 6)), int(rng.integers(1, 7))
    rates = np.zeros((stages, 3, 1, layers + 1))
    rates[:, :, 0, 1:] = rng.uniform(1.0, 50.0, (stages, 3, 1)) / np.arange(1, layers + 1)
    rates[:, :, 0, 1:] *= np.arange(1, layers + 1) <= rng.integers(0, layers + 1)
    tables = RoleTables("r", ("X:1",), rates, (4.0,), float(rng.integers(4, 30)))
    found = equal_nodes(tables, most)
    library = generate(tables, most)
    useful = np.flatnonzero(found > 0.0)
    assert np.array_equal(library.counts[:, 0], useful + 1)
    assert np.array_equal(library.throughput, found[useful])


@pytest.mark.parametrize("phases", ["apart", "auto"])
def test_what_is_recalled_is_what_would_be_worked_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, phases: str
) -> None:
    own = problem(services=(service("a", phases=phases), service("b", phases=phases, ttft_s=3.0)))
    first, facts = anew(own), catalog()
    assert kept(folder)
    forget()
    with fast_cache.recalled(own, facts, RoleCache()):
        recalled = capacities.recall_rates(own, facts)
        handovers = handover.recall_handovers(own, facts)
    assert recalled
    assert len(handovers) == 2
    forget()
    for name, phase, kind, layers, stages, position, region, machine, rates in recalled:
        asked = next(s for s in own.services if s.name == name)
        where = (kind, layers, stages, Position(position), region, machine)
        role = RoleId(name, "llm", Phase(phase))
        assert rates == list(capacities._known_rates(own, facts, asked, role, *where))
    for each in own.services:
        handover.handover(own, facts, each)
    assert handovers == handover.recall_handovers(own, facts)
    assert anew(own) == first
