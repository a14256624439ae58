"""From plan, problem, workload and options to the arrays of the event loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import SWITCHING_LOSS, slowdown
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.plan.measured_service import describe_measured, service_servers
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.routing.pipeline_router import SMOOTHING
from atoll.routing.policies import policy_code
from atoll.sim import sim_arrays as a
from atoll.sim.graphs import Lower, Upper, lower_graph, upper_graph
from atoll.sim.heap import KINDS
from atoll.sim.instance_history import FleetHistory, fleet_history
from atoll.sim.life import life_records
from atoll.sim.lifetime import GAP_BINS
from atoll.sim.sim_links import Sites, interfaces, link_records, site_name, site_records, sites_of
from atoll.sim.sim_options import LLM, ORDERS, SimOptions
from atoll.sim.stage_units import SMALLEST_CHUNK
from atoll.sim.unit_pacing import BATCHES, GRID, pace_table
from atoll.sim.unit_rows import PROMPTS_IN_STEP, UnitMaker, UnitRow
from atoll.workload.requests import Requests

if TYPE_CHECKING:
    from atoll.catalog.measured_servers import MeasuredServer

# Gaps kept per unit; with more, the oldest become one (`gap_push`).
_GAPS = 512
_CHUNKS = 1 << 16
"""The most chunks of prompts under way; with more, prompts are not cut."""
_SPREAD = -1
"""The place of requests that name no service, before they are spread over all of them."""
_PARTS = {Phase.PREFILL: a.PROMPTS, Phase.DECODE: a.ANSWERS, Phase.BOTH: a.ALL}
_FEEDS = {"open": a.OPEN, "closed": a.CLOSED, "watermark": a.WATERMARK}


@dataclass(frozen=True)
class Built:
    """A run that is ready to start, and what its numbers mean; `classes` are those of its requests.

    `servers` has for every service the measured server that its times rest on, None for none; `measured` says
    so in words.
    """

    sim: a.Sim
    history: FleetHistory
    lower: Lower
    sites: Sites
    classes: tuple[str, ...]
    servers: tuple[MeasuredServer | None, ...]
    measured: tuple[str, ...]


def build(
    plan: Plan, problem: Problem, catalog: Catalog, requests: Requests, options: SimOptions
) -> Built:
    """Return a run of a plan (and those that follow it) under a workload."""
    if not len(requests):
        raise InputError("the workload has no requests", field="trace")
    problem = problem.started_as(plan.engines)
    history = fleet_history(plan, options)
    instances = [standing.instance for standing in history.standing]
    if not instances:
        raise InputError("the plan has no instances", field="plan", hint="plan again")
    sites = sites_of(problem, catalog, instances, options.coordinator_s)
    maker = UnitMaker(problem, catalog, options)
    groups = [
        [maker.groups(instance, k) for k in range(len(instance.nodes))] for instance in instances
    ]
    lower = lower_graph(problem, catalog, instances, sites, groups, spare=bool(options.failures))
    upper = upper_graph(problem, history, sites)
    rows = [maker.row(instances[unit.instance], unit.index) for unit in lower.units]
    times = maker.times.build()
    life, change, starts = life_records(history, lower, upper)
    ordered = _in_order(requests)
    unit = _units(lower, instances, rows, sites, problem, options)
    for name in ("kinds", "step_s", "token_s", "shared_s"):
        unit[name] = times.fixed[name][unit["kind"], unit["row"]]
    gpu = _shared_gpus(unit, lower, instances, options)
    pace, unit["paced"] = _pace(lower, unit, instances, maker, options)
    nics = interfaces(catalog, instances)
    run = _run(options, ordered, sites, lower, len(nics), len(problem.services))
    pool, server, level, klass = _components(ordered, options)
    request = _requests(ordered, problem, options)
    count = len(request)
    request = _add_chunks(request, unit)
    # Records of chunks come after those of the requests.
    run["requests"] = count
    run["spare"] = count if len(request) > count else -1
    block, block_id = _keep_blocks(ordered, run, unit, request, instances, problem, options)
    services, bins = len(problem.services), options.bins
    # Ways have a second part only where some instances compute prompts for others.
    apart = any(instance.phase is Phase.PREFILL for instance in instances)
    width = int(run[0]["path"]) * (2 if apart else 1)
    sim = a.Sim(
        run=run,
        unit=unit,
        request=request,
        way=np.zeros((count, width), np.int64),
        leg=np.zeros((count, 2), a.LEG),
        list=_lists(int(run[0]["endings"]) + 1),
        ending=np.zeros((len(unit), _max_running(unit)), a.ENDING),
        flight=np.zeros((len(unit), BATCHES if unit["paced"].any() else 1), np.int64),
        pace=pace,
        gap=np.zeros((len(unit), _GAPS if unit["solo"].any() else 1), a.GAP),
        edge=np.concatenate([lower.edges, upper.edges]),
        vertex=_vertices(lower, upper, unit),
        first=np.concatenate([table.first for table in chain(lower.tables, upper.tables)]),
        graph=_graphs(lower, upper),
        instance=_instances(history, life, lower, upper, problem, options),
        service=_services(problem, catalog, options),
        link=link_records(sites, nics),
        # It never grows: an event of each request, unit and server, and the changes of the fleet.
        heap=np.zeros(len(request) + len(unit) + len(server) + 2 * len(life) + 16, a.EVENT),
        # Above 0 and below both moduli of `draw`.
        random=stream(options.seed, "sim").integers(1, 2147483398, size=2, dtype=np.int64),
        coefficient=times.coefficient,
        prefix=times.prefix,
        curve=times.curve,
        guess=times.guess,
        site=site_records(sites, len(nics)),
        pool=pool,
        server=server,
        task=np.zeros(max(1, _tasks(pool, level, klass, request)), np.int64),
        level=level,
        klass=klass,
        life=life,
        change=change,
        step=np.zeros((5, max(PROMPTS_IN_STEP, int(unit["end"].max()) + 1))),
        todo=np.zeros((2, max(len(lower.edges), 4 * len(unit)) + 64), np.int64),
        unit_bin=np.zeros((3, bins, len(unit)), np.float32),
        service_bin=np.zeros((5, bins, services), np.int64),
        gap_count=np.zeros((services, GAP_BINS), np.int64),
        gpu=gpu,
        block=block,
        block_id=block_id,
    )
    _first_events(sim, starts, options)
    return Built(
        sim,
        history,
        lower,
        sites,
        ordered.classes,
        service_servers(problem, catalog, instances),
        describe_measured(problem, catalog, instances),
    )


def _in_order(requests: Requests) -> Requests:
    if np.any(np.diff(requests.arrival_s) < 0.0):
        return requests.take(np.argsort(requests.arrival_s, kind="stable"))
    return requests


def _run(
    options: SimOptions,
    requests: Requests,
    sites: Sites,
    lower: Lower,
    nodes: int,
    services: int,
) -> a.Records:
    # All lists are in one array: two for each unit, then by service those without a way, by instance
    # those that wait to move, and last the endings.
    waits = 2 * len(lower.units)
    horizon = options.until_s
    if not math.isfinite(horizon):
        # Requests that come all at once still have bins of some width.
        horizon = max(1.0, float(requests.arrival_s[-1]))
    values = {
        "policy": policy_code(options.policy),
        "after_prompt": int(options.first_token),
        "feed": _FEEDS[options.feed],
        # One more than units: the last edge leads to the sink.
        "path": lower.longest + 1,
        "services": len(lower.tables),
        "nodes": nodes,
        "waits": waits,
        "moves": waits + services,
        "endings": waits + services + len(lower.tables),
        "bins": options.bins,
        "high_water": options.high_water,
        "smoothing": SMOOTHING,
        "feed_delay_s": options.feed_delay_s,
        "feed_mark": options.feed_mark,
        "until_s": options.until_s,
        "from_s": options.from_s,
        "bin_s": horizon / options.bins,
        "startup_s": options.startup_s,
        "actual": options.known_outputs,
        "single": options.single_messages,
        "plain": options.router == "plain",
        "paired": sites.paired,
    }
    run = np.zeros(1, a.RUN)
    for name, value in values.items():
        run[name] = value
    return run


def _units(
    lower: Lower,
    instances: Sequence[Instance],
    rows: Sequence[UnitRow],
    sites: Sites,
    problem: Problem,
    options: SimOptions,
) -> a.Records:
    units = np.zeros(len(rows), a.UNIT)
    units["vertex"] = np.flatnonzero(lower.vertices["item"] >= 0)
    for field in fields(UnitRow):
        units[field.name] = [getattr(row, field.name) for row in rows]
    units["instance"] = [unit.instance for unit in lower.units]
    units["node"] = [unit.node for unit in lower.units]
    units["site"] = [
        sites.number(site_name(problem, instances[unit.instance], unit.index))
        for unit in lower.units
    ]
    held = [(table.start[1:-1], table.end[1:-1]) for table in lower.tables]
    units["start"] = np.concatenate([start for start, _ in held])
    units["end"] = np.concatenate([end for _, end in held])
    firsts: dict[tuple[int, int], int] = {}
    for u, each in enumerate(lower.units):
        units["first_rank"][u] = firsts.setdefault((each.instance, each.index), u)
    last = np.array([int(lower.tables[unit.instance].end[-1]) for unit in lower.units])
    # Units with all layers are simulated without an event for every token (`solo`).
    units["solo"] = (units["start"] == 0) & (units["end"] == last)
    stages = [
        longest if problem.cluster is not None else instances[unit.instance].stages
        for unit in lower.units
        for longest in [lower.longest]
    ]
    first = (units["start"] == 0) & (options.batching == "engine")
    units["stages"] = np.where(first, stages, 1)
    units["alive"] = True
    units["step_end"] = -1.0
    for name in ("batch", "joining", "cached_rows", "cache", "oldest", "newest"):
        units[name] = -1
    leaving = lower.edges["reach"] < 0
    tails = lower.vertices["item"][_tails(lower)[leaving]]
    units["back_s"][tails] = lower.edges["latency_s"][leaving]
    return units


def _shared_gpus(
    unit: a.Records, lower: Lower, instances: Sequence[Instance], options: SimOptions
) -> a.Records:
    """Return the GPUs in shares; units of one are linked. A share of nobody knows which is never alone."""
    found: dict[tuple[object, ...], list[int]] = {}
    unit["gpu"] = unit["beside"] = -1
    unit["slowdown"] = 1.0
    for u, each in enumerate(lower.units if options.turns else ()):
        instance = instances[each.instance]
        node = instance.nodes[each.index]
        if node.gpu_shares == 1 or node.gpu_ids is None or (node.slot, node.host) == (None, None):
            continue
        machine = (instance.region_of(node), node.node_type, node.market, node.slot, node.host)
        found.setdefault((*machine, node.gpu_ids[0] // node.gpu_shares), []).append(u)
        unit["slowdown"][u] = slowdown(node.gpu_shares)
    gpus = np.zeros(len(found), a.GPU)
    gpus["next_s"], gpus["next"], gpus["loss"] = np.inf, -1, SWITCHING_LOSS
    for g, units in enumerate(found.values()):
        gpus["first"][g] = units[0]
        unit["gpu"][units] = g
        unit["beside"][units[:-1]] = units[1:]
    return gpus


def _pace(
    lower: Lower,
    unit: a.Records,
    instances: Sequence[Instance],
    maker: UnitMaker,
    options: SimOptions,
) -> tuple[a.Longs, a.Longs]:
    """How many batches units may have under way, by sequences, and which row of that is whose."""
    if options.pacing == "free" or options.batching != "engine":
        return np.zeros((1, 1), np.int64), np.zeros(len(unit), np.int64)
    curves = [
        maker.decode_curve(instances[each.instance], each.index, GRID) for each in lower.units
    ]
    return pace_table(lower, unit, curves, GRID)


def _tails(lower: Lower) -> a.Longs:
    """The vertex, numbered through, that each edge of the instances' graphs leaves."""
    base = np.cumsum([0, *(table.vertices for table in lower.tables)])
    return np.concatenate(
        [base[i] + table.source_of for i, table in enumerate(lower.tables)]
    ).astype(np.int64)


def _max_running(unit: a.Records) -> int:
    return int(unit["max_sequences"].max()) + 1 if unit["solo"].any() else 1


def _vertices(lower: Lower, upper: Upper, unit: a.Records) -> a.Records:
    vertices = np.concatenate([lower.vertices, upper.vertices])
    vertices["room"][unit["vertex"]] = unit["room"]
    return vertices


def _graphs(lower: Lower, upper: Upper) -> a.Records:
    tables = [*lower.tables, *upper.tables]
    graphs = np.zeros(len(tables) + 1, a.GRAPH)
    graphs["vertex"][1:] = np.cumsum([table.vertices for table in tables])
    graphs["edge"][1:] = np.cumsum([table.edges for table in tables])
    return graphs


def _lists(count: int) -> a.Records:
    lists = np.zeros(count, a.LIST)
    lists["head"] = lists["tail"] = -1
    return lists


def _instances(
    history: FleetHistory,
    life: a.Records,
    lower: Lower,
    upper: Upper,
    problem: Problem,
    options: SimOptions,
) -> a.Records:
    records = np.zeros(len(history.standing), a.INSTANCE)
    engines = [one.instance.engine or problem.settings.engine for one in history.standing]
    records["eager"] = [options.admits_by_prompts(engine) for engine in engines]
    records["order"] = [ORDERS[options.order_of(engine)] for engine in engines]
    inner = np.flatnonzero(upper.vertices["item"] >= 0)
    records["vertex"][upper.vertices["item"][inner]] = len(lower.vertices) + inner
    records["part"] = [_PARTS[standing.instance.phase] for standing in history.standing]
    records["ready"] = [standing.ready for standing in history.standing]
    records["ready_s"] = [0.0 if standing.ready else np.nan for standing in history.standing]
    records["gone_s"] = np.nan
    records["after"] = -1
    for standing in history.standing:
        if standing.waits_for is not None:
            comes = (life["kind"] == a.READY) & (life["target"] == standing.number)
            records["after"][standing.waits_for] = int(np.flatnonzero(comes)[0])
    return records


def _services(problem: Problem, catalog: Catalog, options: SimOptions) -> a.Records:
    services = np.zeros(len(problem.services), a.SERVICE)
    for at, service in enumerate(problem.services):
        spec = catalog.model(service.model).llm
        services[at]["layers"] = spec.layers
        services[at]["estimate"] = service.lengths.output_mean * options.output_ratio
        services[at]["promise_s"] = service.ttft_s
        services[at]["kv_bytes"] = spec.kv_bytes_per_token_layer
    return services


def _requests(requests: Requests, problem: Problem, options: SimOptions) -> a.Records:
    records = np.zeros(len(requests), a.REQUEST)
    # In closed loops a request comes when another ends.
    records["arrival_s"] = requests.arrival_s if options.feed == "open" else np.nan
    for name in ("start_s", "first_s", "last_s", "end_s"):
        records[name] = np.nan
    records["prompt"] = records["target"] = np.maximum(requests.input, 1)
    records["answer"] = np.maximum(requests.output, 1)
    for name in ("after", "join", "instance", "slot", "of"):
        records[name] = -1
    records["service"] = _service_of(requests, problem, options.seed)
    records["klass"] = requests.klass
    records["items"] = 1 if requests.items is None else np.maximum(requests.items, 0)
    return records


def _add_chunks(request: a.Records, unit: a.Records) -> a.Records:
    """The requests with records for chunks of prompts after them, as many as may be under way in pipelines.

    All chunks of a prompt have KV cache where it starts, and none but the last is small.
    """
    starts = (unit["start"] == 0) & ~unit["solo"] & unit["chunked"]
    if not starts.any():
        return request
    smallest = np.maximum(1, unit["budget"][starts] // SMALLEST_CHUNK)
    longest = request["prompt"] + request["answer"]
    held = int(np.sum(unit["room"][starts] / smallest))
    asked = int(np.sum(longest[longest > unit["budget"][starts].min() // 2] // smallest.min()))
    chunks = np.zeros(min(held, asked, _CHUNKS), a.REQUEST)
    chunks["after"] = np.arange(1, len(chunks) + 1) + len(request)
    # A slice: there may be no chunks.
    chunks["after"][-1:] = -1
    return np.concatenate([request, chunks])


def _keep_blocks(
    requests: Requests,
    run: a.Records,
    unit: a.Records,
    request: a.Records,
    instances: Sequence[Instance],
    problem: Problem,
    options: SimOptions,
) -> tuple[a.Records, a.Longs]:
    """Blocks that units may keep, by unit and block, and the blocks of all prompts, numbered through."""
    asked = options.prefix_caching

    def caches(instance: Instance) -> bool:
        engine = problem.run_by(instance.engine).engine_of(problem.service(instance.service))
        return engine.on(None).prefix_caching if asked is None else asked

    prompts = np.array(
        [instances[i].phase is not Phase.DECODE and caches(instances[i]) for i in unit["instance"]]
    )
    keeps = np.flatnonzero((unit["start"] == 0) & prompts)
    prefix = requests.prefix
    if prefix is None or not len(prefix.ids) or not len(keeps):
        return np.zeros((1, 1), a.BLOCK), np.zeros(1, np.int64)
    unit["cache"][keeps] = np.arange(len(keeps))
    run["block_tokens"] = prefix.block_tokens
    # Ids become numbers from 0 on, which can index an array.
    known, ids = np.unique(prefix.ids, return_inverse=True)
    count = len(requests)
    request["block"][:count] = prefix.offsets[:-1]
    # Engines keep whole blocks only.
    request["blocks"][:count] = np.minimum(
        np.diff(prefix.offsets), request["prompt"][:count] // prefix.block_tokens
    )
    return np.zeros((len(keeps), len(known)), a.BLOCK), ids.astype(np.int64)


def _service_of(requests: Requests, problem: Problem, seed: int) -> a.Longs:
    """The service of each request: by its name or its model's, or the only one there is.

    Requests that name none are spread over the services at random, in proportion to what is asked of each.
    """
    names = [service.name for service in problem.services]
    models = [service.model for service in problem.services]
    used = np.bincount(requests.model, minlength=len(requests.models))
    place: list[int] = []
    for count, name in zip(used, requests.models, strict=True):
        if name in names:
            place.append(names.index(name))
        elif name in models:
            place.append(models.index(name))
        elif len(names) == 1 or count == 0:
            # The only one there is, or a name that no request has.
            place.append(0)
        elif name == "":
            place.append(_SPREAD)
        else:
            raise UnknownNameError("model of the workload", name, names)
    services = np.array(place, np.int64)[requests.model]
    nameless = services == _SPREAD
    if nameless.any():
        rates = np.array([service.rate_per_s for service in problem.services])
        shares = rates / rates.sum() if rates.sum() > 0 else None
        drawn = stream(seed, "services").choice(len(names), int(nameless.sum()), p=shares)
        services[nameless] = drawn
    return services


def _components(
    requests: Requests, options: SimOptions
) -> tuple[a.Records, a.Records, a.Records, a.Longs]:
    """Pools, their servers, what each class of request goes through, and where its levels start."""
    parts = options.components
    pool = np.zeros(len(parts) + 1, a.POOL_TYPE)
    pool["server"][1:] = np.cumsum([part.servers for part in parts])
    for at, part in enumerate(parts):
        pool[at]["batch"] = part.batch
        pool[at]["fixed_s"], pool[at]["item_s"] = part.fixed_s, part.item_s
    server = np.zeros(int(pool["server"][-1]), a.SERVER)
    server["pool"] = np.repeat(np.arange(len(parts)), [part.servers for part in parts])
    by_name = {part.name: at for at, part in enumerate(parts)}
    levels: list[tuple[int, int]] = []
    klass = [0]
    for name in requests.classes:
        for step, group in enumerate(options.classes.get(name, ((LLM,),))):
            if LLM in group and len(group) > 1:
                raise InputError("the llm runs alone in its step", field=f"classes.{name}")
            for member in group:
                if member != LLM and member not in by_name:
                    raise UnknownNameError("component", member, [LLM, *by_name])
                levels.append((step, by_name.get(member, -1)))
        klass.append(len(levels))
    level = np.array(levels, a.LEVEL)
    return pool, server, level, np.array(klass, np.int64)


def _tasks(pool: a.Records, level: a.Records, klass: a.Longs, request: a.Records) -> int:
    """Count the items that will come to each pool, and set where its queue lies; return all of them."""
    items = np.bincount(request["klass"], weights=request["items"], minlength=len(klass) - 1)
    begin = 0
    for p in range(len(pool) - 1):
        pool[p]["head"] = pool[p]["tail"] = begin
        for c in range(len(klass) - 1):
            uses = int(np.count_nonzero(level["pool"][klass[c] : klass[c + 1]] == p))
            begin += uses * int(items[c])
    return begin


def _first_events(sim: a.Sim, starts: Sequence[tuple[float, int]], options: SimOptions) -> None:
    """Fill the heap: sorted events are one."""
    events = [(float(sim.run[0]["bin_s"]), a.SAMPLE, 0)]
    events += [(time_s, a.LIFE, at) for time_s, at in starts]
    if options.feed != "open":
        begin = min(options.concurrency, int(sim.run[0]["requests"]))
        times = np.arange(begin) * options.feed_delay_s
        sim.request["arrival_s"][:begin] = times
        events += [(float(time_s), a.ARRIVE, r) for r, time_s in enumerate(times)]
        sim.run["fed"] = begin
    for at, (time_s, kind, payload) in enumerate(sorted(events, key=lambda event: event[0])):
        sim.heap[at]["time"] = time_s
        sim.heap[at]["order"] = at
        sim.heap[at]["value"] = payload * KINDS + kind
    sim.run["heaped"] = sim.run["sequence"] = len(events)
