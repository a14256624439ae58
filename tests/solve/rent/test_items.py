"""Items list what templates in regions and running instances take, against the templates themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.rent.items import MANY, PHASES, RentModel, ServiceItems, available_nodes
from atoll.solve.rent.service_oracle import ServiceOracle
from tests.seeds import examples
from tests.solve.rent.cases import Case, model_of, random_case

_CASES = st.integers(0, 100_000)


def _made(seed: int) -> tuple[Case, RentModel]:
    case = random_case(seed, regions=3, running=True)
    return case, model_of(case)


def _takes(case: Case, service: int, items: ServiceItems, item: int) -> dict[int, int]:
    """What an item takes of each row, from its template or from what runs."""
    kinds = len(case.supply.kinds)
    cells = kinds * len(case.supply.regions)
    source, region = int(items.source[item]), int(items.region[item])
    if items.kept[item]:
        return {cells + k: gpus for k, gpus in case.running[source].gpus}
    role = next(r for r in case.services[service].roles if r.phase == items.phase[item])
    counts = role.counts[source]
    return {region * kinds + int(c): int(counts[c]) for c in np.flatnonzero(counts)}


@given(_CASES)
def test_items_take_what_their_template_does(seed: int) -> None:
    case, model = _made(seed)
    price = np.random.default_rng(seed).uniform(0.0, 3.0, model.rows)
    for m, items in enumerate(model.items):
        priced = items.prices(price)
        for item in range(len(items)):
            takes = _takes(case, m, items, item)
            used = np.zeros(model.rows, np.int64)
            used[list(takes)] = list(takes.values())
            assert np.array_equal(items.use({item: 3}, model.rows), 3 * used)
            assert np.isclose(priced[item], float(price @ used))
            assert items.taken()[item] == used.sum()
        some = np.arange(len(items))[::-2].copy()
        place, row, amount = items.list_use(some)
        for at, item in enumerate(some):
            mine = place == at
            listed = dict(zip(row[mine].tolist(), amount[mine].tolist(), strict=True))
            assert listed == _takes(case, m, items, int(item))


@given(_CASES)
def test_every_template_whose_nodes_can_be_had_is_an_item(seed: int) -> None:
    case, model = _made(seed)
    nodes = available_nodes(case.supply)
    for service, items in zip(case.services, model.items, strict=True):
        most = np.where(service.allowed, nodes, 0)
        expected = [
            (role.phase, g, t, min(1.0, float(role.throughput[t] / role.demand)))
            for role in service.roles
            for g in range(model.regions)
            for t in range(len(role.counts))
            if role.throughput[t] > 0.0 and (role.counts[t] <= most[g]).all()
        ]
        new = len(items) - items.running
        found = zip(items.phase, items.region, items.source, items.share, strict=True)
        assert list(found)[:new] == expected
        assert (items.upper[:new] == MANY).all()
        cuts = items.cuts(model.regions)
        for at in range(len(PHASES) * model.regions):
            here = [divmod(at, model.regions)] * int(cuts[at + 1] - cuts[at])
            assert [(p, g) for p, g, *_ in expected[cuts[at] : cuts[at + 1]]] == here
        every = zip(items.phase.tolist(), items.region.tolist(), strict=True)
        stand = {(phase, g) for phase, g in every}
        assert stand == {(p, g) for p in PHASES for g in items.stand_in(model.regions)[p]}


@examples(20)
@given(_CASES)
def test_an_oracle_answers_by_the_prices_it_is_asked_with(seed: int) -> None:
    _, model = _made(seed)
    rng = np.random.default_rng(seed)
    first, second = rng.uniform(0.0, 3.0, (2, model.rows))
    for service, items in zip(model.services, model.items, strict=True):
        oracle = ServiceOracle(service, items, model.regions)
        for prices in (first, first, second, first):
            fresh = ServiceOracle(service, items, model.regions).legs(prices.copy())
            found = oracle.legs(prices)
            assert np.array_equal(found.cost, fresh.cost)
            assert np.array_equal(found.total.value, fresh.total.value)
            assert found.gain == fresh.gain
        # Prices that change in place are other prices.
        changed = first.copy()
        oracle.legs(changed)
        changed *= 2.0
        assert np.array_equal(oracle.legs(changed).cost, np.maximum(0.0, items.prices(changed)))
