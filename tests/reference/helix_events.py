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
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from atoll.routing import decisions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_Event = tuple[float, int, int, int]
_Soon = tuple[int, int, int]

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
_NUMBER, _STAMP, _FED, _PROMPTS, _DECODES, _TURNED, _WAITED, _OVERFLOWS, _ENDED = range(9)
"""Counts of `State.count`."""
_ARRIVED_QUEUE, _WAITING_QUEUE = range(2)
"""Queues of `State.hall_first`: at the sink, and of those that found no way."""
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


_OURS = OURS
_round_robin = njit(cache=True)(decisions.round_robin)


class _Fixed(NamedTuple):
    """What does not change in a run: `Placed` with links by vertex, and the work."""

    router: int
    online: bool
    layers: int
    source: int
    sink: int
    start: Ints
    end: Ints
    kv_entries: Floats
    prompt_requests: Ints
    prompt_tokens: Ints
    decode_requests: Ints
    decode_context: Ints
    prompt_s: Floats
    decode_s: Floats
    gather_s: float
    first: Ints
    head: Ints
    latency_s: Floats
    speed: Floats
    per_token: Floats
    flow: Floats
    weight: Floats
    order: Ints
    sweep: Ints
    arrival_s: Floats
    prompt: Ints
    answer: Ints
    mark: float
    expected: float
    begin_s: float
    from_s: float
    until_s: float


class _State(NamedTuple):
    """What changes. A request stands in one queue at a time; `after` is who comes next in it."""

    count: Ints
    # Requests: the links of their way and how many, how far along, tokens done, when this pass began.
    way: Ints
    hops: Ints
    at: Ints
    done: Ints
    began_s: Floats
    after: Ints
    stamp: Ints
    # Links: who waits for each, who is sent.
    queue_first: Ints
    queue_last: Ints
    sending: Ints
    # Nodes: who waits before each layer (from `base` on), the batch, the layer, tokens not yet copied, cache.
    base: Ints
    slot_first: Ints
    slot_last: Ints
    batch: Ints
    layer: Ints
    uncopied: Ints
    used: Floats
    booked: Floats
    # The routers.
    charge: Floats
    credit: Floats
    full: Flags
    closed: Flags
    hall_first: Ints
    hall_last: Ints
    told_prompt_s: Floats
    told_decode_s: Floats


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
    mark, ratio = (0.9, 0.6) if online else (0.85, 1.0)
    fixed = _Fixed(
        router=router,
        online=online,
        layers=placed.layers,
        source=nodes,
        sink=nodes + 1,
        start=placed.start,
        end=placed.end,
        kv_entries=placed.kv_entries,
        prompt_requests=placed.prompt_requests,
        prompt_tokens=placed.prompt_tokens,
        decode_requests=placed.decode_requests,
        decode_context=placed.decode_context,
        prompt_s=placed.prompt_s,
        decode_s=placed.decode_s,
        gather_s=placed.activation_bytes * GATHER_S,
        first=first,
        head=head,
        latency_s=placed.latency_s[by_tail],
        speed=np.floor(np.minimum(placed.bytes_per_s[by_tail], share * placed.nic_bytes_per_s)),
        per_token=np.where(outer, 0.0, placed.activation_bytes) + placed.token_bytes,
        flow=flow,
        weight=np.where(flow < few * out[tail], 0.0, flow),
        order=placed.order[by_tail],
        # From the sink back: the source has done no layers.
        sweep=np.argsort(-np.concatenate([placed.end, [0, placed.layers + 1]]), kind="stable"),
        arrival_s=work.arrival_s + begin_s,
        prompt=work.prompt,
        answer=work.answer,
        mark=mark,
        expected=MEAN_ANSWER * ratio,
        begin_s=begin_s,
        from_s=begin_s + from_s,
        until_s=begin_s + until_s,
    )
    state = _blank(fixed)
    _simulate(fixed, state)
    count = state.count
    return Run(
        int(count[_DECODES]) / (until_s - from_s),
        state.told_prompt_s[: count[_PROMPTS]],
        state.told_decode_s[: count[_DECODES]],
        turned_away=int(count[_TURNED]),
        waited=int(count[_WAITED]),
        overflows=int(count[_OVERFLOWS]),
        ended=int(count[_ENDED]),
    )


def _blank(fixed: _Fixed) -> _State:
    total, links, nodes = len(fixed.prompt), len(fixed.head), len(fixed.start)
    held = fixed.end - fixed.start
    base = np.concatenate([[0], np.cumsum(held)]).astype(np.int64)

    def none(count: int) -> Ints:
        return np.full(count, -1, np.int64)

    def zero(count: int) -> Ints:
        return np.zeros(count, np.int64)

    return _State(
        count=zero(9),
        way=np.full((total, _MOST_HOPS), -1, np.int64),
        hops=zero(total),
        at=zero(total),
        done=zero(total),
        began_s=np.full(total, -1.0),
        after=none(total),
        stamp=zero(total),
        queue_first=none(links),
        queue_last=none(links),
        sending=none(links),
        base=base,
        slot_first=none(int(base[-1])),
        slot_last=none(int(base[-1])),
        batch=none(nodes),
        layer=zero(nodes),
        uncopied=zero(nodes),
        used=np.zeros(nodes),
        booked=np.zeros(nodes),
        charge=np.zeros(links),
        credit=np.zeros(links),
        full=np.zeros(nodes + 2, np.bool_),
        closed=np.zeros(nodes + 2, np.bool_),
        hall_first=none(2),
        hall_last=none(2),
        told_prompt_s=np.empty(total),
        told_decode_s=np.empty(int(fixed.answer.sum())),
    )


# What follows is compiled. `later` is a heap of (seconds, number, what, which), `soon` what is due at once.


@njit(cache=True)
def _simulate(f: _Fixed, s: _State) -> None:
    later = [(f.begin_s, 0, _NEW, 0)]
    later.pop()
    soon = [(0, 0, 0)]
    soon.pop()
    total = len(f.prompt)
    while s.count[_FED] < total and (f.online or s.count[_FED] < _STARTING):
        fed = s.count[_FED]
        due = f.arrival_s[fed] if f.online else f.begin_s + fed * _FEED_DELAY_S
        s.count[_FED] += 1
        _push(s, later, due, _NEW, fed)
    now, read = f.begin_s, 0
    while read < len(soon) or len(later) > 0:
        # Of what happens at one instant that goes first which was set off first.
        is_soon = read < len(soon) and (
            len(later) == 0 or later[0][0] > now or later[0][1] > soon[read][0]
        )
        if is_soon:
            _, what, which = soon[read]
            read += 1
            if read == len(soon):
                soon.clear()
                read = 0
        else:
            now, _, what, which = heapq.heappop(later)
            if now >= f.until_s:
                return
        if what == _NEW:
            _begin_pass(f, s, soon, which, now)
        elif what == _SEND:
            _send(f, s, later, which, now)
        elif what == _SENT:
            _free_link(f, s, later, soon, which, now)
        elif what == _ARRIVED:
            _receive(f, s, soon, which)
        elif what == _BEGIN:
            _begin_batch(f, s, later, which, now)
        elif what == _RAN:
            _end_batch(f, s, soon, which)
        else:
            _collect(f, s, later, soon, now)


@njit(cache=True)
def _push(s: _State, later: list[_Event], time_s: float, what: int, which: int) -> None:
    heapq.heappush(later, (time_s, s.count[_NUMBER], what, which))
    s.count[_NUMBER] += 1


@njit(cache=True)
def _push_soon(s: _State, soon: list[_Soon], what: int, which: int) -> None:
    soon.append((s.count[_NUMBER], what, which))
    s.count[_NUMBER] += 1


@njit(cache=True)
def _append(first: Ints, last: Ints, after: Ints, queue: int, q: int) -> None:
    after[q] = -1
    if first[queue] < 0:
        first[queue] = q
    else:
        after[last[queue]] = q
    last[queue] = q


@njit(cache=True)
def _size(f: _Fixed, s: _State, q: int) -> int:
    """Tokens of a request's pass."""
    return f.prompt[q] if s.done[q] == 0 else 1


@njit(cache=True)
def _begin_pass(f: _Fixed, s: _State, soon: list[_Soon], q: int, now: float) -> None:
    if s.done[q] == 0:
        if s.began_s[q] < 0.0:
            s.began_s[q] = now
        if not _find_way(f, s, q):
            if f.online:
                s.count[_WAITED] += 1
                _append(s.hall_first, s.hall_last, s.after, _WAITING_QUEUE, q)
            else:
                s.count[_TURNED] += 1
            return
        _book(f, s, q, 1.0)
    else:
        s.began_s[q] = now
        _charge(f, s, q, 1.0)
    s.at[q] = 0
    _queue_for_link(s, q)
    _push_soon(s, soon, _SEND, f.source)


@njit(cache=True)
def _queue_for_link(s: _State, q: int) -> None:
    s.count[_STAMP] += 1
    s.stamp[q] = s.count[_STAMP]
    _append(s.queue_first, s.queue_last, s.after, s.way[q, s.at[q]], q)


@njit(cache=True)
def _find_way(f: _Fixed, s: _State, q: int) -> bool:
    """Write the way of a request's first pass and charge it; say if there is one."""
    need = int(f.prompt[q] + f.expected)
    for i in range(len(f.start)):
        room = f.kv_entries[i] - s.booked[i] - need * (f.end[i] - f.start[i])
        s.full[i] = room < (1.0 - f.mark) * f.kv_entries[i] or f.prompt[q] > f.prompt_tokens[i]
    if f.router == _OURS and not _shut(f, s):
        return False
    v, hops = f.source, 0
    while v != f.sink:
        if f.router == _OURS:
            e = _round_robin(f.first, f.head, f.weight, f.order, s.credit, v, s.closed)
        else:
            e = _least_charged(f, s, v, f.prompt[q])
        if e < 0:
            return False
        s.way[q, hops] = e
        hops += 1
        v = f.head[e]
    s.hops[q] = hops
    _charge(f, s, q, float(f.prompt[q]))
    return True


@njit(cache=True)
def _least_charged(f: _Fixed, s: _State, v: int, size: int) -> int:
    best, least = -1, np.inf
    for e in range(f.first[v], f.first[v + 1]):
        if f.weight[e] > 0.0 and not s.full[f.head[e]]:
            charge = s.charge[e] + size / f.flow[e]
            if charge < least:
                best, least = e, charge
    return best


@njit(cache=True)
def _shut(f: _Fixed, s: _State) -> bool:
    """Close what is full and what leads to nothing else; say if any way is open."""
    for v in f.sweep:
        s.closed[v] = v != f.sink
        if v == f.sink or s.full[v]:
            continue
        for e in range(f.first[v], f.first[v + 1]):
            if f.weight[e] > 0.0 and not s.closed[f.head[e]]:
                s.closed[v] = False
                break
    return not s.closed[f.source]


@njit(cache=True)
def _charge(f: _Fixed, s: _State, q: int, tokens: float) -> None:
    for h in range(s.hops[q]):
        e = s.way[q, h]
        s.charge[e] += tokens / f.flow[e]


@njit(cache=True)
def _book(f: _Fixed, s: _State, q: int, sign: float) -> None:
    """Book the cache a request is expected to need on its way, or give it back with what it used."""
    need = int(f.prompt[q] + f.expected)
    reached = 0
    for h in range(s.hops[q] - 1):
        i = f.head[s.way[q, h]]
        held = f.end[i] - max(f.start[i], reached)
        s.booked[i] += sign * need * held
        if sign < 0.0:
            s.used[i] -= s.done[q] * held
        reached = f.end[i]


@njit(cache=True)
def _send(f: _Fixed, s: _State, later: list[_Event], v: int, now: float) -> None:
    """Send on every idle link out of a vertex, in the order of the requests that wait."""
    while True:
        best = -1
        for e in range(f.first[v], f.first[v + 1]):
            q = s.queue_first[e]
            if s.sending[e] >= 0 or q < 0:
                continue
            if best < 0 or s.stamp[q] < s.stamp[s.queue_first[best]]:
                best = e
        if best < 0:
            return
        q = s.queue_first[best]
        s.queue_first[best] = s.after[q]
        s.sending[best] = q
        taken_s = f.latency_s[best] + f.per_token[best] * _size(f, s, q) / f.speed[best]
        _push(s, later, now + taken_s - f.latency_s[best], _SENT, best)


@njit(cache=True)
def _free_link(
    f: _Fixed, s: _State, later: list[_Event], soon: list[_Soon], e: int, now: float
) -> None:
    q = s.sending[e]
    s.sending[e] = -1
    _push_soon(s, soon, _SEND, f.source if s.at[q] == 0 else f.head[s.way[q, s.at[q] - 1]])
    _push(s, later, now + f.latency_s[e], _ARRIVED, q)


@njit(cache=True)
def _receive(f: _Fixed, s: _State, soon: list[_Soon], q: int) -> None:
    v = f.head[s.way[q, s.at[q]]]
    if v == f.sink:
        _append(s.hall_first, s.hall_last, s.after, _ARRIVED_QUEUE, q)
        _push_soon(s, soon, _END, 0)
        return
    reached = f.end[f.head[s.way[q, s.at[q] - 1]]] if s.at[q] > 0 else 0
    slot = s.base[v] + reached - f.start[v]
    _append(s.slot_first, s.slot_last, s.after, slot, q)
    s.uncopied[v] += _size(f, s, q)
    _push_soon(s, soon, _BEGIN, v)


@njit(cache=True)
def _next_layer(f: _Fixed, s: _State, v: int) -> int:
    """The next layer before which any request waits, the same one where none does elsewhere."""
    count = f.end[v] - f.start[v]
    for step in range(1, count):
        tried = (s.layer[v] + step) % count
        if s.slot_first[s.base[v] + tried] >= 0:
            return tried
    return s.layer[v]


@njit(cache=True)
def _begin_batch(f: _Fixed, s: _State, later: list[_Event], v: int, now: float) -> None:
    if s.batch[v] >= 0:
        return
    if s.slot_first[s.base[v] + s.layer[v]] < 0:
        s.layer[v] = _next_layer(f, s, v)
    if s.slot_first[s.base[v] + s.layer[v]] < 0:
        return
    prompt_tokens, sequences = _fill_batch(f, s, v)
    taken_s = f.prompt_s[v, prompt_tokens] + f.decode_s[v, sequences]
    if s.layer[v] == 0:
        taken_s += s.uncopied[v] * f.gather_s
        s.uncopied[v] = 0
    _push(s, later, now + taken_s, _RAN, v)


@njit(cache=True)
def _fill_batch(f: _Fixed, s: _State, v: int) -> tuple[int, int]:
    """Take what fits a batch, in order, out of the queue; return its prompt tokens and sequences."""
    here = s.base[v] + s.layer[v]
    requests, tokens, sequences, context = 0, 0, 0, 0
    q = s.slot_first[here]
    s.slot_first[here] = -1
    last = -1
    while q >= 0:
        following, done = s.after[q], s.done[q]
        if done == 0:
            fits = requests < f.prompt_requests[v] and tokens + f.prompt[q] <= f.prompt_tokens[v]
        else:
            fits = sequences < f.decode_requests[v] and context + done <= f.decode_context[v]
        if not fits:
            _append(s.slot_first, s.slot_last, s.after, here, q)
            q = following
            continue
        if done == 0:
            requests, tokens = requests + 1, tokens + f.prompt[q]
        else:
            sequences, context = sequences + 1, context + done
        if last < 0:
            s.batch[v] = q
        else:
            s.after[last] = q
        s.after[q] = -1
        last = q
        q = following
    return tokens, sequences


@njit(cache=True)
def _end_batch(f: _Fixed, s: _State, soon: list[_Soon], v: int) -> None:
    q = s.batch[v]
    s.batch[v] = -1
    is_last = s.layer[v] == f.end[v] - f.start[v] - 1
    while q >= 0:
        following = s.after[q]
        s.used[v] += _size(f, s, q)
        if is_last:
            s.at[q] += 1
            _queue_for_link(s, q)
        else:
            _append(s.slot_first, s.slot_last, s.after, s.base[v] + s.layer[v] + 1, q)
        q = following
    if s.used[v] > f.kv_entries[v]:
        s.count[_OVERFLOWS] += 1
    s.layer[v] = _next_layer(f, s, v)
    if is_last:
        _push_soon(s, soon, _SEND, v)
    _push_soon(s, soon, _BEGIN, v)


@njit(cache=True)
def _collect(f: _Fixed, s: _State, later: list[_Event], soon: list[_Soon], now: float) -> None:
    q = s.hall_first[_ARRIVED_QUEUE]
    s.hall_first[_ARRIVED_QUEUE] = -1
    while q >= 0:
        following = s.after[q]
        is_prompt = s.done[q] == 0
        s.done[q] += _size(f, s, q)
        if now >= f.from_s:
            _tell(s, is_prompt, now - s.began_s[q])
        is_over = s.done[q] == f.prompt[q] + f.answer[q]
        if is_over:
            s.count[_ENDED] += 1
            _book(f, s, q, -1.0)
            # Those that found no way try again, in their order.
            while s.hall_first[_WAITING_QUEUE] >= 0:
                waiting = s.hall_first[_WAITING_QUEUE]
                s.hall_first[_WAITING_QUEUE] = s.after[waiting]
                _push_soon(s, soon, _NEW, waiting)
        else:
            _push_soon(s, soon, _NEW, q)
        if is_prompt or is_over:
            _feed(f, s, later, now)
        q = following


@njit(cache=True)
def _tell(s: _State, is_prompt: bool, seconds: float) -> None:
    if is_prompt:
        s.told_prompt_s[s.count[_PROMPTS]] = seconds
        s.count[_PROMPTS] += 1
    else:
        s.told_decode_s[s.count[_DECODES]] = seconds
        s.count[_DECODES] += 1


@njit(cache=True)
def _feed(f: _Fixed, s: _State, later: list[_Event], now: float) -> None:
    """Let the next request in, offline, unless the fullest layer's cache is booked."""
    fed = s.count[_FED]
    if f.online or fed == len(f.prompt):
        return
    room, free = np.zeros(f.layers), np.zeros(f.layers)
    for i in range(len(f.start)):
        held = f.end[i] - f.start[i]
        for j in range(f.start[i], f.end[i]):
            free[j] += (f.kv_entries[i] - s.booked[i]) / held
            room[j] += f.kv_entries[i] / held
    if (1.0 - free / room).max() <= _FEED_MARK:
        s.count[_FED] += 1
        _push(s, later, now + _FEED_DELAY_S, _NEW, fed)
