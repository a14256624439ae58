"""Links and routes: messages between units, and the way each request takes (decisions from `routing`)."""

from __future__ import annotations

import math

from atoll.routing import compiled
from atoll.sim.heap import push
from atoll.sim.sim_arrays import (
    ALL,
    ANSWERS,
    CURVES,
    DELIVER,
    KV_HERE,
    LAYER_WIDTH,
    PREFILL,
    PROMPTS,
    TOUCHED,
    Sim,
)
from atoll.sim.sim_kernel import kernel


@kernel
def carry_cache(z: Sim, link: int, now: float, size: float, bytes_per_s: float) -> float:
    """Put KV cache on a link and return when the last byte has left; a link sends one after the other.

    Messages that are under way when it comes are sent first.
    """
    one = z.link[link]
    took = size / bytes_per_s
    left = max(now, one.free_s, one.quick_s) + took
    one.free_s = left
    one.busy_s += took
    one.bytes += size
    return left


@kernel
def carry(z: Sim, link: int, now: float, size: float, bytes_per_s: float) -> float:
    """Put a message on a link and return when its last byte has left.

    Messages go one after the other. They do not wait behind KV caches, which are a hundred times as large:
    both flow at once, at half the speed each, as streams on one wire do.
    """
    one = z.link[link]
    took = size / bytes_per_s
    left = max(now, one.quick_s) + took
    # A KV cache is on the link at the same time: both take twice as long.
    if one.free_s > left - took:
        left += took
        one.free_s += took
    one.quick_s = left
    one.busy_s += took
    one.bytes += size
    return left


@kernel
def front_seconds(z: Sim, u: int) -> float:
    """Return what a request that comes to a unit now waits beside steps, whatever its length."""
    unit = z.unit[u]
    return unit.front_s + unit.stream_s * unit.running


@kernel
def send(z: Sim, now: float, e: int, head: int, tokens: float) -> None:
    """Send the requests of the list at `head` over an edge as one message of so many tokens.

    Sender and receiver each take their messages in turn; it is there when both are done with it. Requests
    that come in are read before they wait for a step; no message has such ones and others.
    """
    edge = z.edge[e]
    size = tokens * edge.token_bytes
    left = carry(z, edge.link, now, size, edge.bytes_per_s)
    if edge.into >= 0:
        left = max(left, carry(z, edge.into, now, size, z.link[edge.into].bytes_per_s))
    there = left + edge.latency_s
    if z.request[head].state == PREFILL and z.request[head].hop == 0:
        there += front_seconds(z, edge.reach)
        there += z.unit[edge.reach].tokenize_s * z.request[head].prompt
    push(z, there, DELIVER, head)


@kernel
def post(z: Sim, now: float, e: int, r: int, tokens: int) -> None:
    """Send a request over an edge, together with others of this moment unless each goes alone."""
    z.request[r].after = -1
    z.request[r].sent_s = now
    z.request[r].over = e
    if z.run[0].single:
        send(z, now, e, r, float(tokens))
        return
    edge = z.edge[e]
    if edge.head < 0:
        edge.head = r
        edge.size = 0.0
        # Every edge is in the list once, however many requests go over it.
        z.todo[TOUCHED, z.run[0].touched] = e
        z.run[0].touched += 1
    else:
        z.request[edge.tail].after = r
    edge.tail = r
    edge.size += tokens


@kernel
def flush(z: Sim, now: float) -> None:
    """Send what was posted."""
    for i in range(z.run[0].touched):
        e = z.todo[TOUCHED, i]
        send(z, now, e, z.edge[e].head, z.edge[e].size)
        z.edge[e].head = -1
    z.run[0].touched = 0


@kernel
def close(z: Sim, g: int) -> bool:
    """Close vertices of graph g that are masked or lead nowhere; say if any way is left."""
    low, high = z.graph[g].vertex, z.graph[g + 1].vertex
    edge, stop = z.graph[g].edge, z.graph[g + 1].edge
    # `first` has one entry more than vertices for every graph: those before this one shift it by g.
    return compiled.close(
        z.first[low + g : high + g + 1],
        z.edge["target"][edge:stop],
        z.edge["weight"][edge:stop],
        z.vertex["sweep"][low:high],
        z.vertex["masked"][low:high],
        z.vertex["closed"][low:high],
    )


@kernel
def hop(z: Sim, g: int, vertex: int) -> int:
    """Return the edge that the policy takes from a vertex of graph g, -1: wait."""
    low, high = z.graph[g].vertex, z.graph[g + 1].vertex
    edge, stop = z.graph[g].edge, z.graph[g + 1].edge
    found = compiled.next_hop(
        z.run[0].policy,
        z.first[low + g : high + g + 1],
        z.edge["target"][edge:stop],
        z.edge["weight"][edge:stop],
        z.edge["order"][edge:stop],
        z.edge["credit"][edge:stop],
        z.edge["delay"][edge:stop],
        z.vertex["queue"][low:high],
        z.vertex["load"][low:high],
        z.random[0:2],
        vertex,
        z.vertex["closed"][low:high],
    )
    return edge + found if found >= 0 else -1


@kernel
def instance_open(z: Sim, i: int, need: float) -> bool:
    """Return whether some pipeline of instance i can take `need` more tokens; closes what cannot.

    Eager engines take all that come and queue them, unless they get KV cache that needs room at once.
    """
    low, high = z.graph[i].vertex, z.graph[i + 1].vertex
    mark = z.run[0].high_water
    fetches = False
    if z.instance[i].eager:
        fetches = z.instance[i].part == ANSWERS
        mark = 1.0 if fetches else math.inf
    if high - low == 3:
        # One unit: the same, without looking at a graph.
        only = z.vertex[low + 1]
        limit = only.room * mark if only.booked > 0.0 else only.room
        shut = only.dead or only.booked + need > limit
        if fetches and z.unit[only.item].used + need > only.room:
            shut = True
        only.closed = shut
        z.vertex[low].closed = shut
        return not shut
    compiled.mask_full(
        z.vertex["booked"][low:high],
        z.vertex["room"][low:high],
        mark,
        need,
        z.vertex["masked"][low:high],
    )
    for v in range(low, high):
        vertex = z.vertex[v]
        if vertex.dead or (
            fetches and vertex.item >= 0 and z.unit[vertex.item].used + need > vertex.room
        ):
            vertex.masked = True
    if z.run[0].plain:
        return next_open(z, i)
    return close(z, i)


@kernel
def next_open(z: Sim, i: int) -> bool:
    """Close what is masked in instance i and no more; return whether any first hop is open."""
    low, high = z.graph[i].vertex, z.graph[i + 1].vertex
    base = z.graph[i].edge
    for v in range(low, high):
        z.vertex[v].closed = z.vertex[v].masked
    # As in `close`, `first` is shifted by one entry for every graph before.
    for e in range(base + z.first[low + i], base + z.first[low + i + 1]):
        if z.edge[e].weight > 0.0 and not z.vertex[low + z.edge[e].target].closed:
            return True
    return False


@kernel
def plain_hop(z: Sim, g: int, vertex: int, tokens: float) -> int:
    """Return the edge that a router without look-ahead takes from a vertex of graph g, -1: a dead end."""
    low, high = z.graph[g].vertex, z.graph[g + 1].vertex
    edge, stop = z.graph[g].edge, z.graph[g + 1].edge
    found = compiled.min_charged(
        z.first[low + g : high + g + 1],
        z.edge["target"][edge:stop],
        z.edge["weight"][edge:stop],
        z.edge["credit"][edge:stop],
        vertex,
        z.vertex["closed"][low:high],
        tokens,
    )
    return edge + found if found >= 0 else -1


@kernel
def charge(z: Sim, r: int, part: int, tokens: float) -> None:
    """Charge the edges of a request's pipeline with tokens, for a router that goes by them."""
    begin = part * z.run[0].path
    for k in range(z.leg[r, part].hops + 1):
        edge = z.edge[z.way[r, begin + k]]
        edge.credit += tokens / edge.weight


@kernel
def service_open(z: Sim, g: int, prompt: float, whole: float) -> bool:
    """Close the instances of a service's graph that cannot take a request; say if any way is left.

    It is counted with `prompt` tokens where only its prompt is computed or counts, with `whole` where all is.
    """
    for v in range(z.graph[g].vertex + 1, z.graph[g + 1].vertex - 1):
        vertex = z.vertex[v]
        one = z.instance[vertex.item]
        shut = not one.ready or one.draining
        if not shut:
            need = 0.0
            if one.part == PROMPTS or (one.part == ALL and one.eager):
                need = prompt
            elif one.part == ALL:
                need = whole
            shut = not instance_open(z, vertex.item, need)
        vertex.masked = shut
    return close(z, g)


@kernel
def partners(z: Sim, r: int) -> tuple[int, int]:
    """Return the first edge to those who may decode what a request's instance computed, and past the last."""
    c = z.request[r]
    g = z.run[0].services + c.service
    base = z.graph[g].edge
    # Shifted by g as in `close`.
    v = z.instance[c.instance].vertex + g
    return base + z.first[v], base + z.first[v + 1]


@kernel
def partners_open(z: Sim, r: int) -> None:
    """Close the instances that could decode a request and cannot take its tokens."""
    low = z.graph[z.run[0].services + z.request[r].service].vertex
    first, stop = partners(z, r)
    for e in range(first, stop):
        i = z.edge[e].reach
        one = z.instance[i]
        shut = not one.ready or one.draining
        z.vertex[low + z.edge[e].target].closed = shut or not instance_open(
            z, i, tokens_needed(z, r, i)
        )


@kernel
def stranded(z: Sim, r: int) -> bool:
    """Return whether nobody who is there may decode what a request's instance computed."""
    first, stop = partners(z, r)
    for e in range(first, stop):
        one = z.instance[z.edge[e].reach]
        if z.edge[e].weight > 0.0 and one.ready and not one.draining:
            return False
    return True


@kernel
def tokens_needed(z: Sim, r: int, i: int) -> float:
    """Return the KV tokens a request is counted with at an instance."""
    c = z.request[r]
    if z.instance[i].part == PROMPTS or z.instance[i].eager:
        return float(c.target)
    return tokens_booked(z, r)


@kernel
def tokens_booked(z: Sim, r: int) -> float:
    """Return the KV tokens of a request with its whole answer, as far as that is known."""
    c = z.request[r]
    estimate = float(c.answer) if z.run[0].actual else z.service[c.service].estimate
    return compiled.reservation(float(c.prompt), float(c.made), estimate)


@kernel
def share_at(z: Sim, u: int, reached: int) -> float:
    """Return the share of its layers that a unit runs for a request that has done `reached`."""
    return compiled.share_run(z.unit[u].start, z.unit[u].end, reached)


@kernel
def route(z: Sim, r: int, part: int) -> bool:
    """Choose instance and pipeline of a request for its first part or, apart, for decode.

    Books KV cache on every unit of the pipeline. False: every way is full or dead; nothing changes.
    """
    c = z.request[r]
    g = z.run[0].services + c.service
    vertex = 0
    if part == 1:
        partners_open(z, r)
        vertex = z.instance[c.instance].vertex - z.graph[g].vertex
    elif not service_open(z, g, float(c.target), tokens_booked(z, r)):
        return False
    e = hop(z, g, vertex)
    if e < 0:
        return False
    i = z.edge[e].reach
    need = tokens_needed(z, r, i)
    low = z.graph[i].vertex
    sink = z.graph[i + 1].vertex - low - 1
    begin = part * z.run[0].path
    vertex, hops, reached = 0, 0, 0
    # With look-ahead what leads nowhere is closed by now, and every hop finds an edge.
    while True:
        e = plain_hop(z, i, vertex, float(c.target)) if z.run[0].plain else hop(z, i, vertex)
        if e < 0:
            return False
        z.way[r, begin + hops] = e
        vertex = z.edge[e].target
        if vertex == sink:
            break
        hops += 1
    for k in range(hops):
        u = z.edge[z.way[r, begin + k]].reach
        # A unit is counted with the layers that those before it have not done.
        z.vertex[z.unit[u].vertex].booked += need * share_at(z, u, reached)
        reached = z.unit[u].end
    c.instance = i
    z.leg[r, part].hops = hops
    if z.run[0].plain:
        charge(z, r, part, float(c.target))
    z.leg[r, part].need = need
    z.instance[i].holds += 1
    count(z, r, part, 1.0)
    return True


@kernel
def count(z: Sim, r: int, part: int, step: float) -> None:
    """Add a request to (or take it off) the loads that policies look at."""
    begin = part * z.run[0].path
    for k in range(z.leg[r, part].hops):
        vertex = z.vertex[z.unit[z.edge[z.way[r, begin + k]].reach].vertex]
        vertex.load += step / vertex.speed
    vertex = z.vertex[z.instance[z.unit[z.edge[z.way[r, begin]].reach].instance].vertex]
    vertex.queue += step
    vertex.load += step / vertex.speed


@kernel
def unbook(z: Sim, r: int, part: int) -> None:
    """Take a request off the books of the units of a part."""
    count(z, r, part, -1.0)
    begin = part * z.run[0].path
    reached = 0
    for k in range(z.leg[r, part].hops):
        u = z.edge[z.way[r, begin + k]].reach
        vertex = z.vertex[z.unit[u].vertex]
        vertex.booked -= z.leg[r, part].need * share_at(z, u, reached)
        reached = z.unit[u].end
        # Rounding must not keep a unit from being empty: an empty one takes any request that fits.
        if vertex.booked < 1e-6:
            vertex.booked = 0.0
    z.instance[z.unit[z.edge[z.way[r, begin]].reach].instance].holds -= 1


@kernel
def cached_tokens(z: Sim, u: int, low: int, high: int, tokens: int) -> float:
    """Return the tokens, summed over layers [low, high) of a unit, that a prompt leaves in the KV cache.

    Layers with a window keep no more than it, layers with a state as much as so many tokens would.
    """
    unit = z.unit[u]
    if unit.kind == CURVES:
        return float(tokens * (high - low))
    total = 0.0
    for k in range(unit.kinds):
        window = z.coefficient[unit.row, k + 1, 0]
        kept = float(tokens) if window < 0.0 else min(float(tokens), window)
        kept += z.coefficient[unit.row, 0, LAYER_WIDTH - 1 - k]
        total += kept * (z.prefix[unit.row, high, k] - z.prefix[unit.row, low, k])
    return total


@kernel
def move_cache(z: Sim, r: int, now: float) -> None:
    """Send the KV cache of a request from its prefill units to its decode units, layers to layers.

    Each piece takes its turn at the interfaces of both nodes and on the link that regions share, or, in a
    cluster, on the link that joins the two. Engines that are asked one after the other read it there, too.
    """
    c = z.request[r]
    path = z.run[0].path
    there = now
    reached = 0
    for k in range(z.leg[r, 0].hops):
        u = z.edge[z.way[r, k]].reach
        a = z.unit[u]
        low = max(reached, a.start)
        reached = a.end
        past = 0
        for j in range(z.leg[r, 1].hops):
            b = z.unit[z.edge[z.way[r, path + j]].reach]
            # Layers that both units run for this request, and no unit before them.
            begin, stop = max(low, past, b.start), min(reached, b.end)
            past = b.end
            if begin >= stop:
                continue
            site = z.site[a.site, b.site]
            tokens = cached_tokens(z, u, begin, stop, c.target)
            piece = tokens * z.service[c.service].kv_bytes
            left = now + piece / site.bytes_per_s
            if site.link >= 0:
                left = max(
                    left, carry_cache(z, site.link, now, piece, z.link[site.link].bytes_per_s)
                )
            if not z.run[0].paired:
                out, into = a.node, z.run[0].nodes + b.node
                left = max(left, carry_cache(z, out, now, piece, z.link[out].bytes_per_s))
                left = max(left, carry_cache(z, into, now, piece, z.link[into].bytes_per_s))
            there = max(there, left + site.latency_s)
    push(z, there + front_seconds(z, z.edge[z.way[r, path]].reach), KV_HERE, r)
