"""How long a token takes once round its pipeline, at given request rates (numba).

Notation. Requests have I prompt and O generated tokens on average; c = E[prompt^2] / I^2. Node i runs j
layers for r requests/s. All that waits when a step ends joins the next (best-effort batching). A step
without prompts takes d = step_s + j D(batch), a prompt adds p = j P(I).

Steps. Prompts come at random, so step lengths form a chain tau' = d + p * Poisson(r tau), with
E tau = d / (1 - rho) and M = E tau^2 / E tau = E tau + c p rho / (1 - rho^2), rho = r p. A token shares
its step with those that came in the step it found, so its batch is 1 + r O M.

Prompts in front. p is many times d. A token that finds a prompt at work waits for the rest of it, c p / 2 on
average, and then follows it: the prompt leaves a step earlier, is still at work at the next node when
the token arrives, and so on as long as both go the same way. Let s be the chance that a token leaves a
node behind a prompt. Where the prompt takes the token's edge (its share w of what leaves) the token
waits c p - lag at the next node, its lag being the time it comes after the prompt. Otherwise it meets a
prompt from its own edge that left within p - lag before it, or one from other edges within p:

    a  = s w                                            still behind the same prompt
    nu = 1 - exp(-(r_own (p - lag)+ + r_other p))         meets a new one
    w  = a (f - lag)+ + (1 - a) (nu f / 2 + (1 - nu) min(1, r O d) d / 2)
    s' = a + (1 - a) nu
    h  = d + w + r p (s' f + (1 - s') min(1, r O d) d)

No token meets a prompt older than its own last trip: that one was in front of it then, and came out before
it. So (p - lag)+ counts only as long as it and those of all servers before it, together how much longer a
prompt takes to here than a token, are within the token's trip. Behind several slow links they are not: a
prompt takes 5 s where a token is round in 2.5. Trips and what counts are found in turn, from long trips down.

The step that is found takes f = c p (1 + r p): a prompt, and those that came while it waited. The last term
of h is what prompts add that came while the token waited: all that waits joins the next step, so a token
runs beside prompts, in steps many times as long as its own, about as often as prompts keep the node busy.

On a lane without branches, with few and equal prompts at random, this is exact: a token's trip is the longer
of its own and what is left of the newest prompt's (slow trucks on a road without passing). A link
is a server too: d and p are the times to send a token and a prompt. Links that are much faster than
steps add their latency and no waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.array_types import Floats, Ints

BATCHES = 512
"""Decode times are tabulated for batches up to this many tokens and go on with their last slope."""
NEVER = 1e9
"""Seconds that stand for: it never ends."""
PASSES = 12
"""How often trips and the prompts that are met on them are found in turn; differences shrink to a third."""


class Site(NamedTuple):
    """A cluster and a model as the evaluators read it; n nodes.

    `decode_s[i, b]` is seconds per layer for a batch of b tokens, `prompt_s[i]` per layer for a mean
    prompt; `kv[i, j]` tokens that may be counted on node i beside j layers, of which a request counts
    `held` for as long as it stays. A node may be filled to `spare` times that, where its layers may not.
    `spread` is c.
    """

    layers: int
    partial: bool
    prompt: float
    answer: float
    spread: float
    held: float
    spare: float
    step_s: Floats
    decode_s: Floats
    prompt_s: Floats
    kv: Floats
    rate: Floats
    link: Floats
    latency: Floats
    enter: Floats
    enter_s: Floats
    leave: Floats
    leave_s: Floats


SITE_TYPE = (
    "Tuple((int64, boolean, float64, float64, float64, float64, float64, float64[::1], float64[:, ::1],"
    " float64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1],"
    " float64[::1], float64[::1], float64[::1], float64[::1]))"
)
"""Type of a `Site` in entries: a plain tuple, whose type has a name in numba."""


class Arcs(NamedTuple):
    """Arcs that carry flow over a placement, sorted by the layer that is reached (see `sustained_kernel`).

    Arc a leads from `tail[a]` (-1: source) to `head[a]` (-2: sink) with `flow[a]` tokens/s. Arcs into a node
    stand before arcs out of it.
    """

    tail: Ints
    head: Ints
    flow: Floats


@lean_part
def fill(array: Floats, value: float) -> None:
    """Write one value everywhere."""
    for i in range(len(array)):
        array[i] = value


@lean_part
def step_of(site: Site, node: int, layers: float, rate: float) -> tuple[float, float]:
    """Return (d, M) of a node at `rate` requests/s; M = NEVER where it cannot keep up."""
    p = layers * site.prompt_s[node]
    rho = rate * p
    tokens = rate * site.answer
    d = site.step_s[node] + layers * site.decode_s[node, 1]
    # Prompts alone take all of the node's time: the queue grows without end.
    if rho >= 1.0:
        return d, NEVER
    # Step and batch depend on each other; the fixed point is found by turns, from an empty node.
    met = d
    for _ in range(60):
        batch = 1.0 + tokens * met
        if batch < BATCHES:
            low = int(batch)
            share = batch - low
            each = site.decode_s[node, low] * (1.0 - share) + site.decode_s[node, low + 1] * share
        else:
            slope = site.decode_s[node, BATCHES] - site.decode_s[node, BATCHES - 1]
            each = site.decode_s[node, BATCHES] + slope * (batch - BATCHES)
        d = site.step_s[node] + layers * each
        new = d / (1.0 - rho) + site.spread * p * rho / (1.0 - rho * rho)
        # Beyond hours there is no use in going on: nothing that takes this long lasts.
        if new > 1e4:
            return d, NEVER
        if abs(new - met) <= 1e-5 * met:
            return d, new
        met = new
    return d, met


@lean_part
def new_of(lead: float, gap: float, trip: float) -> float:
    """Return the seconds in which prompts start that a token meets here and not before.

    A prompt takes `lead` seconds longer than a token to come here and `gap` longer to leave; it started
    within the last trip of the token.
    """
    return min(lead + gap, trip) - min(lead, trip)


@lean_part
def link_of(
    one: float,
    latency: float,
    rate: float,
    site: Site,
    behind: float,
    lag: float,
    lead: float,
    trip: float,
) -> tuple[float, float, float]:
    """Return (seconds of a token over a link, chance to leave it behind a prompt, lag behind it).

    `one` is the seconds a token takes to be sent; it comes behind a prompt with chance `behind`, then `lag`
    seconds after it. Of the others, those meet one that started early enough (`new_of`).
    """
    p = one * site.prompt
    load = rate * (p + one * site.answer)
    if load >= 1.0:
        return NEVER, 1.0, one
    gap = p - lag
    # The token comes after the prompt is sent: it meets nothing, and its lag shrinks by what the prompt took.
    if gap <= 0.0:
        return latency + one, behind, one + lag - p
    new = new_of(lead, gap, trip)
    meets = (1.0 - behind) * (1.0 - np.exp(-rate * new))
    left = site.spread * p * (1.0 - new / gap / 2.0)
    wait = behind * max(site.spread * p - lag, 0.0) + meets * left
    return latency + one + wait, behind + meets, one


@lean_part
def round_trips(
    site: Site,
    arcs: Arcs,
    scale: float,
    run: Floats,
    through: Floats,
    arc_s: Floats,
    hop_s: Floats,
    behind: Floats,
    trip: Floats,
    step: Floats,
    on: Floats,
    lead: Floats,
) -> float:
    """Fill the round trips of tokens through each node at `scale` times the flow; return their mean.

    `run[i]` is the layers node i runs on average, `through[i]` its flow in tokens/s. Filled: `arc_s[a]`
    seconds over each arc, `hop_s[i]` at each node, `behind[i]` the chance to leave it behind a prompt,
    `trip[i]` the seconds once round for a token that passes it. NEVER where something is overloaded.
    `step`, `on` and `lead` are scratch, by node.
    """
    size = len(through)
    per_request = site.prompt + site.answer
    fill(step, 0.0)
    for i in range(size):
        if through[i] > 0.0:
            step[i], met = step_of(site, i, run[i], scale * through[i] / per_request)
            if met >= NEVER:
                return NEVER
    total = 0.0
    for a in range(len(arcs.tail)):
        if arcs.tail[a] < 0:
            total += arcs.flow[a]
    # Long trips first: then all prompts count, and each pass can only lower the trips.
    fill(trip, NEVER)
    mean = NEVER
    for _ in range(PASSES):
        before = mean
        worst, longest = _forward(
            site, arcs, scale, run, through, step, arc_s, hop_s, behind, lead, trip
        )
        if worst >= NEVER:
            return NEVER
        mean = _rounds(arcs, through, total, arc_s, hop_s, trip, on)
        shortest = NEVER
        for i in range(size):
            if through[i] > 0.0:
                shortest = min(shortest, trip[i])
        # If no lead exceeds the shortest trip, trips do not limit what is met, and another pass changes
        # nothing.
        if longest <= shortest or before - mean <= 1e-4 * mean:
            break
    return mean


@lean_part
def _forward(
    site: Site,
    arcs: Arcs,
    scale: float,
    run: Floats,
    through: Floats,
    step: Floats,
    arc_s: Floats,
    hop_s: Floats,
    behind: Floats,
    lead: Floats,
    trip: Floats,
) -> tuple[float, float]:
    """One pass from source to sink: fill seconds and chances, given the trips through each node.

    Also fills `lead`, how much longer a prompt takes than a token until it leaves each node. Returns the
    seconds of the slowest arc, and the largest lead.
    """
    per_request = site.prompt + site.answer
    fill(hop_s, 0.0)
    fill(behind, 0.0)
    fill(lead, 0.0)
    worst = longest = 0.0
    # Arcs into a node stand before those out of it, so all that a node takes in is known when it is left.
    for a in range(len(arcs.tail)):
        i, k = arcs.tail[a], arcs.head[a]
        own = scale * arcs.flow[a] / per_request
        if i < 0:
            comes, lag, ahead = 0.0, 0.0, 0.0
            one, latency = 1.0 / site.enter[k], site.enter_s[k]
        else:
            comes, lag, ahead = behind[i] * arcs.flow[a] / through[i], step[i], lead[i]
            if k < 0:
                one, latency = 1.0 / site.leave[i], site.leave_s[i]
            else:
                one, latency = 1.0 / site.link[i, k], site.latency[i, k]
        if k < 0:
            # Only the new token goes to the sink, also after a prompt.
            arc_s[a] = latency + one
            continue
        sent = one * site.prompt - lag
        seconds, comes, lag = link_of(one, latency, own, site, comes, lag, ahead, trip[k])
        ahead = max(ahead + sent, 0.0)
        worst = max(worst, seconds)
        arc_s[a] = seconds
        p = run[k] * site.prompt_s[k]
        rate = scale * through[k] / per_request
        gap = max(p - lag, 0.0)
        new = new_of(ahead, gap, trip[k])
        some, all_new = own * new, own * new + (rate - own) * p
        meets = 1.0 - np.exp(-all_new)
        # Of a prompt that is met, half is left, or more if only young ones can be.
        left = 1.0 - (some * new / gap + all_new - some) / all_new / 2.0 if some > 0.0 else 0.5
        works = min(1.0, rate * site.answer * step[k])
        meets *= 1.0 - comes
        # A step with a prompt takes in those that came while it waited, so what is found is longer than one.
        busy = rate * p
        found = site.spread * p * (1.0 + busy)
        free = (1.0 - comes - meets) * works * step[k]
        wait = comes * max(found - lag, 0.0) + meets * found * left + free / 2.0
        # Prompts that come during the step a token finds share the step it joins, and it ends with them.
        shared = busy * ((comes + meets) * found + free)
        share = arcs.flow[a] / through[k]
        hop_s[k] += share * (step[k] + wait + shared)
        behind[k] += share * (comes + meets)
        # Those that come the same way, and those that come from elsewhere.
        ahead = max(ahead + p - lag, 0.0)
        lead[k] += share * (share * ahead + (1.0 - share) * p)
        longest = max(longest, ahead)
    return worst, longest


@lean_part
def _rounds(
    arcs: Arcs,
    through: Floats,
    total: float,
    arc_s: Floats,
    hop_s: Floats,
    trip: Floats,
    on: Floats,
) -> float:
    """Fill the mean seconds once round through each node: to it, at it, and on from it."""
    size = len(through)
    fill(on, 0.0)
    fill(trip, 0.0)
    mean = 0.0
    # Forward: seconds from the source to each node, weighted by what comes over each arc.
    for a in range(len(arcs.tail)):
        i, k = arcs.tail[a], arcs.head[a]
        so_far = arc_s[a] + (trip[i] + hop_s[i] if i >= 0 else 0.0)
        if k >= 0:
            trip[k] += so_far * arcs.flow[a] / through[k]
        else:
            mean += so_far * arcs.flow[a] / total
    # Backward: seconds from each node on to the sink, by the same order in reverse.
    for a in range(len(arcs.tail) - 1, -1, -1):
        i, k = arcs.tail[a], arcs.head[a]
        if i >= 0:
            rest = arc_s[a] + (hop_s[k] + on[k] if k >= 0 else 0.0)
            on[i] += rest * arcs.flow[a] / through[i]
    for i in range(size):
        if through[i] > 0.0:
            trip[i] += hop_s[i] + on[i]
    return mean
