"""Helix's event simulator (ASPLOS '25) by its rules, event for event: what plans are judged with that no code
of Atoll's made.

A node runs one layer at a time for all requests that wait before it, then goes on with the next layer before
which any wait, round and round. Of a queue it takes, in order of arrival, what fits the limits of a batch.
The first layer takes longer by what it costs to gather and copy the tokens that came in since. A link sends
one request at a time, with the share of the network cards that the flow gives it. Links, batches and arrivals
of one instant happen in the order in which they were set off, so that a run is the same event for event.

Requests are routed at their first pass and keep that way. `IWRR` is Helix's scheduler: at every node the way
with the least tokens per flow, of those with 5 % of the flow or more and room in the KV cache they lead to.
`OURS` is what Atoll's gateway does: `routing.decisions`, which shuts ways that end before a full node.

Offline, 20 requests start, and whenever a prompt or a request ends and at most 80 % of the fullest layer's
cache is booked the next one comes in; one that finds no way is turned away. Online they arrive by the clock;
one that finds no way waits until another ends (Helix's own simulator stops there).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from atoll.routing import decisions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

IWRR, OURS = 0, 1
FEW = 0.05
"""Share of what leaves a vertex below which Helix's scheduler does not use a way."""
MEAN_ANSWER = 240
GATHER_S = 1 / 4e9 + 1 / 5e9
"""Seconds a byte of activations takes to be gathered on the host and copied to the GPU."""
_FEED_DELAY_S = 0.1
_FEED_MARK = 0.8
_STARTING = 20

_NEW, _SEND, _SENT, _ARRIVED, _BEGIN, _RAN, _END = range(7)
"""What happens: a pass begins, a vertex sends, a link is free, a message is there, a node begins a batch, has
run it, the sink collects."""
_MOST_HOPS = 128


@dataclass(frozen=True)
class Placed:
    """Nodes with their layers, and the links between them with their flow, tokens/s.

    Vertices 0 .. n - 1 are nodes, n is the source and n + 1 the sink. Node i holds layers [start, end) and
    `kv_entries[i]` tokens of KV cache, counted once per layer. `prompt_s[i, p]` and `decode_s[i, d]` are the
    seconds a layer takes for p prompt tokens and for d requests that decode. Links stand ordered by the
    vertex they leave, and their order decides ties; `order` is that of Atoll's router.
    """

    layers: int
    start: Ints
    end: Ints
    kv_entries: Floats
    prompt_requests: Ints
    prompt_tokens: Ints
    decode_requests: Ints
    decode_context: Ints
    prompt_s: Floats
    decode_s: Floats
    activation_bytes: float
    token_bytes: float
    nic_bytes_per_s: float
    tail: Ints
    head: Ints
    latency_s: Floats
    bytes_per_s: Floats
    flow: Floats
    order: Ints


@dataclass(frozen=True)
class Work:
    """Requests in order, with arrival times (online) and tokens of prompt and answer."""

    arrival_s: Floats
    prompt: Ints
    answer: Ints


@dataclass(frozen=True)
class Run:
    """Generated tokens/s in the window, and latencies of prompts and of each token after, in seconds.

    `turned_away` and `waited` are how often a request found no way; `overflows` how often a node held more
    than it can, where Helix's own simulator stops; `ended` the requests answered.
    """

    tokens_per_s: float
    prompt_s: Floats
    decode_s: Floats
    turned_away: int
    waited: int
    overflows: int
    ended: int


_round_robin = njit(cache=True)(decisions.round_robin)


def run(
    placed: Placed,
    work: Work,
    *,
    router: int = IWRR,
    online: bool = False,
    begin_s: float = 0.0,
    from_s: float = 60.0,
    until_s: float = 660.0,
) -> Run:
    """Return what a placement does with some work; the window is counted from `begin_s`."""
    nodes = len(placed.start)
    by_tail = np.argsort(placed.tail, kind="stable")
    tail, head = placed.tail[by_tail], placed.head[by_tail]
    flow = placed.flow[by_tail]
    first = np.zeros(nodes + 3, np.int64)
    np.cumsum(np.bincount(tail, minlength=nodes + 2), out=first[1:])
    out = np.bincount(tail, weights=flow, minlength=nodes + 2)
    into = np.bincount(head, weights=flow, minlength=nodes + 2)
    # Sending has its share of both network cards, however idle they are.
    share = np.minimum(
        np.divide(flow, out[tail], out=np.zeros_like(flow), where=out[tail] > 0),
        np.divide(flow, into[head], out=np.zeros_like(flow), where=into[head] > 0),
    )
    outer = (tail == nodes) | (head == nodes + 1)
    few = 0.0 if router == OURS else FEW
    # From the sink back: the source has done no layers.
    sweep = np.argsort(-np.concatenate([placed.end, [0, placed.layers + 1]]), kind="stable")
    mark, ratio = (0.9, 0.6) if online else (0.85, 1.0)
    counts, prompt_s, decode_s = _simulate(
        router,
        online,
        placed.layers,
        placed.start,
        placed.end,
        placed.kv_entries,
        placed.prompt_requests,
        placed.prompt_tokens,
        placed.decode_requests,
        placed.decode_context,
        placed.prompt_s,
        placed.decode_s,
        placed.activation_bytes * GATHER_S,
        first,
        head,
        placed.latency_s[by_tail],
        np.floor(np.minimum(placed.bytes_per_s[by_tail], share * placed.nic_bytes_per_s)),
        np.where(outer, 0.0, placed.activation_bytes) + placed.token_bytes,
        flow,
        np.where(flow < few * out[tail], 0.0, flow),
        placed.order[by_tail],
        sweep,
        work.arrival_s + begin_s,
        work.prompt,
        work.answer,
        mark,
        MEAN_ANSWER * ratio,
        begin_s,
        begin_s + from_s,
        begin_s + until_s,
    )
    turned, waited, overflows, ended = (int(count) for count in counts)
    return Run(
        len(decode_s) / (until_s - from_s), prompt_s, decode_s, turned, waited, overflows, ended
    )


@njit(cache=True)
def _append(first: Ints, last: Ints, after: Ints, queue: int, q: int) -> None:
    after[q] = -1
    if first[queue] < 0:
        first[queue] = q
    else:
        after[last[queue]] = q
    last[queue] = q


@njit(cache=True)
def _count(counts: Ints, row: int, prompt: int, done: int) -> None:
    """Count a request that does its prompt, or that decodes, with what stands together."""
    if done == 0:
        counts[row, 0] += 1
        counts[row, 1] += prompt
    else:
        counts[row, 2] += 1
        counts[row, 3] += done


@njit(cache=True)
def _next_layer(slot_first: Ints, base: int, count: int, layer: int) -> int:
    """The next layer before which any request waits, the same one where none does elsewhere."""
    for step in range(1, count):
        tried = (layer + step) % count
        if slot_first[base + tried] >= 0:
            return tried
    return layer


@njit(cache=True)
def _fullest(layers: int, start: Ints, end: Ints, kv_entries: Floats, booked: Floats) -> float:
    """The booked share of the KV cache of the layer with the largest one."""
    room, free = np.zeros(layers), np.zeros(layers)
    for i in range(len(start)):
        held = end[i] - start[i]
        for j in range(start[i], end[i]):
            free[j] += (kv_entries[i] - booked[i]) / held
            room[j] += kv_entries[i] / held
    return float((1.0 - free / room).max())


@njit(cache=True)
def _shut(first: Ints, head: Ints, weight: Floats, sweep: Ints, full: Flags, closed: Flags) -> bool:
    """Close what is full and what leads to nothing else; say if any way is open."""
    source, sink = len(closed) - 2, len(closed) - 1
    for v in sweep:
        closed[v] = v != sink
        if v == sink or full[v]:
            continue
        for e in range(first[v], first[v + 1]):
            if weight[e] > 0.0 and not closed[head[e]]:
                closed[v] = False
                break
    return not closed[source]


@njit(cache=True)
def _min_charged(
    first: Ints, head: Ints, weight: Floats, charge: Floats, full: Flags, v: int, size: float
) -> int:
    best, least = -1, np.inf
    for e in range(first[v], first[v + 1]):
        if weight[e] > 0.0 and not full[head[e]]:
            after = charge[e] + size / weight[e]
            if after < least:
                best, least = e, after
    return best


@njit(cache=True)
def _simulate(  # noqa: C901 - one loop over events; split up it would pass sixty arrays around
    router: int,
    online: bool,
    layers: int,
    start: Ints,
    end: Ints,
    kv_entries: Floats,
    prompt_requests: Ints,
    prompt_tokens: Ints,
    decode_requests: Ints,
    decode_context: Ints,
    prompt_s: Floats,
    decode_s: Floats,
    gather_s: float,
    first: Ints,
    head: Ints,
    latency_s: Floats,
    speed: Floats,
    per_token: Floats,
    flow: Floats,
    weight: Floats,
    order: Ints,
    sweep: Ints,
    arrival_s: Floats,
    prompt: Ints,
    answer: Ints,
    mark: float,
    expected: float,
    begin_s: float,
    from_s: float,
    until_s: float,
) -> tuple[Ints, Floats, Floats]:
    """Run to `until_s`; return (turned away, waited, overflows, ended) and the latencies told."""
    nodes = len(start)
    source, sink = nodes, nodes + 1
    total, links = len(prompt), len(head)
    counts = np.zeros(4, np.int64)
    told_prompt_s = np.empty(total)
    told_decode_s = np.empty(answer.sum())
    prompts, decodes = 0, 0
    # Requests: the links of their way and how many, how far along, tokens done, when this pass began. Each
    # stands in one queue at a time; `after` is who comes next in it.
    way = np.full((total, _MOST_HOPS), -1, np.int64)
    hops = np.zeros(total, np.int64)
    at = np.zeros(total, np.int64)
    done = np.zeros(total, np.int64)
    began_s = np.full(total, -1.0)
    after = np.full(total, -1, np.int64)
    stamp = np.zeros(total, np.int64)
    stamps = 0
    # Links: who waits for each, who is sent.
    queue_first = np.full(links, -1, np.int64)
    queue_last = np.full(links, -1, np.int64)
    sending = np.full(links, -1, np.int64)
    # Nodes: who waits before each layer, the batch, the layer, tokens not yet copied, the cache.
    # `slot` and `running` say what stands in a queue and in a batch, all together: prompts, their tokens,
    # requests that decode, their context. So a batch goes on to the next layer as a whole.
    base = np.zeros(nodes + 1, np.int64)
    base[1:] = np.cumsum(end - start)
    slot_first = np.full(base[nodes], -1, np.int64)
    slot_last = np.full(base[nodes], -1, np.int64)
    slot = np.zeros((base[nodes], 4), np.int64)
    batch = np.full(nodes, -1, np.int64)
    batch_last = np.full(nodes, -1, np.int64)
    running = np.zeros((nodes, 4), np.int64)
    layer = np.zeros(nodes, np.int64)
    uncopied = np.zeros(nodes, np.int64)
    used = np.zeros(nodes)
    booked = np.zeros(nodes)
    # The routers.
    charge = np.zeros(links)
    credit = np.zeros(links)
    full = np.zeros(nodes + 2, np.bool_)
    closed = np.zeros(nodes + 2, np.bool_)
    # Queues of those that arrived at the sink (0) and of those that found no way (1).
    hall_first = np.full(2, -1, np.int64)
    hall_last = np.full(2, -1, np.int64)
    # What is due later (seconds, number, what, which), and what is due now in the order it was set off.
    later = [(begin_s, 0, _NEW, 0)]
    soon = [(0, 0, 0)]
    later.pop()
    soon.pop()
    read, number, fed = 0, 0, 0
    while fed < total and (online or fed < _STARTING):
        due = arrival_s[fed] if online else begin_s + fed * _FEED_DELAY_S
        heapq.heappush(later, (due, number, _NEW, fed))
        number += 1
        fed += 1
    now = begin_s
    while read < len(soon) or len(later) > 0:
        # Of what happens at one instant that goes first which was set off first.
        if read < len(soon) and (
            len(later) == 0 or later[0][0] > now or later[0][1] > soon[read][0]
        ):
            _, what, which = soon[read]
            read += 1
            if read == len(soon):
                soon.clear()
                read = 0
        else:
            time_s, _, what, which = heapq.heappop(later)
            if time_s >= until_s:
                break
            now = time_s
        if what == _NEW:
            q = which
            if done[q] == 0:
                if began_s[q] < 0.0:
                    began_s[q] = now
                need = int(prompt[q] + expected)
                for i in range(nodes):
                    room = kv_entries[i] - booked[i] - need * (end[i] - start[i])
                    short = room < (1.0 - mark) * kv_entries[i]
                    full[i] = short or prompt[q] > prompt_tokens[i]
                found = router != OURS or _shut(first, head, weight, sweep, full, closed)
                hops[q] = 0
                v = source
                while found and v != sink:
                    if router == OURS:
                        e = _round_robin(first, head, weight, order, credit, v, closed)
                    else:
                        e = _min_charged(first, head, weight, charge, full, v, prompt[q])
                    if e < 0:
                        found = False
                    else:
                        way[q, hops[q]] = e
                        hops[q] += 1
                        v = head[e]
                if not found:
                    if online:
                        counts[1] += 1
                        _append(hall_first, hall_last, after, 1, q)
                    else:
                        counts[0] += 1
                    continue
                reached = 0
                for h in range(hops[q] - 1):
                    i = head[way[q, h]]
                    booked[i] += need * (end[i] - max(start[i], reached))
                    reached = end[i]
            else:
                began_s[q] = now
            size = prompt[q] if done[q] == 0 else 1
            for h in range(hops[q]):
                charge[way[q, h]] += size / flow[way[q, h]]
            at[q] = 0
            stamps += 1
            stamp[q] = stamps
            _append(queue_first, queue_last, after, way[q, 0], q)
            soon.append((number, _SEND, source))
            number += 1
        elif what == _SEND:
            # On every idle link, in the order of the requests that wait.
            v = which
            while True:
                best = -1
                for e in range(first[v], first[v + 1]):
                    q = queue_first[e]
                    if sending[e] >= 0 or q < 0:
                        continue
                    if best < 0 or stamp[q] < stamp[queue_first[best]]:
                        best = e
                if best < 0:
                    break
                q = queue_first[best]
                queue_first[best] = after[q]
                sending[best] = q
                size = prompt[q] if done[q] == 0 else 1
                taken_s = latency_s[best] + per_token[best] * size / speed[best]
                due = now + taken_s - latency_s[best]
                heapq.heappush(later, (due, number, _SENT, best))
                number += 1
        elif what == _SENT:
            e = which
            q = sending[e]
            sending[e] = -1
            v = source if at[q] == 0 else head[way[q, at[q] - 1]]
            soon.append((number, _SEND, v))
            heapq.heappush(later, (now + latency_s[e], number + 1, _ARRIVED, q))
            number += 2
        elif what == _ARRIVED:
            q = which
            v = head[way[q, at[q]]]
            if v == sink:
                _append(hall_first, hall_last, after, 0, q)
                soon.append((number, _END, 0))
            else:
                reached = end[head[way[q, at[q] - 1]]] if at[q] > 0 else 0
                here = base[v] + reached - start[v]
                _append(slot_first, slot_last, after, here, q)
                _count(slot, here, prompt[q], done[q])
                uncopied[v] += prompt[q] if done[q] == 0 else 1
                soon.append((number, _BEGIN, v))
            number += 1
        elif what == _BEGIN:
            v = which
            if batch[v] >= 0:
                continue
            if slot_first[base[v] + layer[v]] < 0:
                layer[v] = _next_layer(slot_first, base[v], end[v] - start[v], layer[v])
            here = base[v] + layer[v]
            if slot_first[here] < 0:
                continue
            fits = (
                slot[here, 0] <= prompt_requests[v]
                and slot[here, 1] <= prompt_tokens[v]
                and slot[here, 2] <= decode_requests[v]
                and slot[here, 3] <= decode_context[v]
            )
            if fits:
                batch[v], batch_last[v] = slot_first[here], slot_last[here]
                running[v] = slot[here]
                slot_first[here] = -1
                slot[here] = 0
            else:
                # What fits a batch, in order; what does not stays in the queue.
                q = slot_first[here]
                slot_first[here] = -1
                slot[here] = 0
                running[v] = 0
                while q >= 0:
                    following = after[q]
                    if done[q] == 0:
                        fits = (
                            running[v, 0] < prompt_requests[v]
                            and running[v, 1] + prompt[q] <= prompt_tokens[v]
                        )
                    else:
                        fits = (
                            running[v, 2] < decode_requests[v]
                            and running[v, 3] + done[q] <= decode_context[v]
                        )
                    if fits:
                        _append(batch, batch_last, after, v, q)
                        _count(running, v, prompt[q], done[q])
                    else:
                        _append(slot_first, slot_last, after, here, q)
                        _count(slot, here, prompt[q], done[q])
                    q = following
            taken_s = prompt_s[v, running[v, 1]] + decode_s[v, running[v, 2]]
            if layer[v] == 0:
                taken_s += uncopied[v] * gather_s
                uncopied[v] = 0
            heapq.heappush(later, (now + taken_s, number, _RAN, v))
            number += 1
        elif what == _RAN:
            v = which
            q = batch[v]
            batch[v] = -1
            used[v] += running[v, 1] + running[v, 2]
            is_last = layer[v] == end[v] - start[v] - 1
            if not is_last:
                here = base[v] + layer[v] + 1
                if slot_first[here] < 0:
                    slot_first[here] = q
                else:
                    after[slot_last[here]] = q
                slot_last[here] = batch_last[v]
                slot[here] += running[v]
            while is_last and q >= 0:
                following = after[q]
                at[q] += 1
                stamps += 1
                stamp[q] = stamps
                _append(queue_first, queue_last, after, way[q, at[q]], q)
                q = following
            if used[v] > kv_entries[v]:
                counts[2] += 1
            layer[v] = _next_layer(slot_first, base[v], end[v] - start[v], layer[v])
            if is_last:
                soon.append((number, _SEND, v))
                number += 1
            soon.append((number, _BEGIN, v))
            number += 1
        else:
            q = hall_first[0]
            hall_first[0] = -1
            while q >= 0:
                following = after[q]
                is_prompt = done[q] == 0
                done[q] += prompt[q] if is_prompt else 1
                if now >= from_s:
                    if is_prompt:
                        told_prompt_s[prompts] = now - began_s[q]
                        prompts += 1
                    else:
                        told_decode_s[decodes] = now - began_s[q]
                        decodes += 1
                is_over = done[q] == prompt[q] + answer[q]
                if is_over:
                    counts[3] += 1
                    reached = 0
                    need = int(prompt[q] + expected)
                    for h in range(hops[q] - 1):
                        i = head[way[q, h]]
                        held = end[i] - max(start[i], reached)
                        booked[i] -= need * held
                        used[i] -= done[q] * held
                        reached = end[i]
                    # Those that found no way try again, in their order.
                    while hall_first[1] >= 0:
                        soon.append((number, _NEW, hall_first[1]))
                        number += 1
                        hall_first[1] = after[hall_first[1]]
                else:
                    soon.append((number, _NEW, q))
                    number += 1
                if (
                    not online
                    and (is_prompt or is_over)
                    and fed < total
                    and _fullest(layers, start, end, kv_entries, booked) <= _FEED_MARK
                ):
                    heapq.heappush(later, (now + _FEED_DELAY_S, number, _NEW, fed))
                    number += 1
                    fed += 1
                q = following
    return counts, told_prompt_s[:prompts], told_decode_s[:decodes]
