"""How long a step takes, inside the event loop: the formulas of `perf`, and measured curves.

Coefficients come from `times.py`; the maths is that of `perf.operators`, `perf.layers` and `perf.batch`,
for the prompts and sequences actually in the batch instead of their means.
"""

from __future__ import annotations

from atoll.sim.sim_arrays import (
    CACHED,
    CURVES,
    DECODE_S,
    DECODE_X,
    DENSE_MAX,
    LENGTH,
    PROMPT_S,
    PROMPT_X,
    Floats,
    Sim,
)
from atoll.sim.sim_kernel import kernel

_PREFILL = 4 + 5 * DENSE_MAX
_DECODE = _PREFILL + 6
_EXPERTS = _DECODE + 6
_REDUCE = _EXPERTS + 9
_LAUNCH = _REDUCE + 4


@kernel
def roofline(c: Floats, at: int, m: float) -> float:
    """Return the seconds of a product with m rows."""
    p = c[at + 4]
    return ((c[at] * m) ** p + (c[at + 1] + c[at + 2] * m) ** p) ** (1.0 / p) + c[at + 3]


@kernel
def all_reduce(c: Floats, at: int, m: float) -> float:
    """Return the seconds to sum m rows over GPUs."""
    p = c[at + 2]
    return (c[at + 1] ** p + (c[at] * m) ** p) ** (1.0 / p)


@kernel
def experts(c: Floats, at: int, m: float) -> float:
    """Return the seconds of the experts of a layer for m tokens."""
    p = c[at + 7]
    active = c[at] * (1.0 - (1.0 - c[at + 1] / c[at]) ** m)
    compute = c[at + 2] * (m * c[at + 1] + c[at + 5] * active)
    memory = c[at + 3] * active + c[at + 4] * m
    return (compute**p + memory**p) ** (1.0 / p) + c[at + 6]


@kernel
def rows_seconds(c: Floats, m: float) -> float:
    """Return the seconds of a layer without attention for m rows."""
    total = c[1] * m + c[2]
    for i in range(int(c[3])):
        total += roofline(c, 4 + 5 * i, m)
    if c[_EXPERTS] > 0.0:
        total += experts(c, _EXPERTS + 1, m)
    if c[_REDUCE] > 0.0:
        total += 2.0 * all_reduce(c, _REDUCE + 1, m)
    return total


@kernel
def prefill_seconds(c: Floats, n: int, length: Floats, reached: Floats) -> float:
    """Return the seconds of a layer's attention for n prompts of so many new tokens after cached ones."""
    window = c[0]
    pairs = 0.0
    tokens = 0.0
    keys = 0.0
    reach = 0.0
    for i in range(n):
        new, old = length[i], reached[i]
        tokens += new
        reach += new + old
        if window < 0.0:
            pairs += new * old + 0.5 * new * new
            keys += new + old
        else:
            # So many new tokens see less than a whole window.
            below = min(new, max(window - old, 0.0))
            ramp = below * old + 0.5 * below * below
            pairs += min(ramp + (new - below) * window, new * window)
            keys += new + min(old, window)
    longest = reach / n
    if window >= 0.0:
        longest = min(longest, window)
    p = c[_PREFILL + 5]
    return (
        (c[_PREFILL] * pairs) ** p
        + (c[_PREFILL + 1] * tokens + c[_PREFILL + 2] * keys) ** p
        + (c[_PREFILL + 3] * longest) ** p
    ) ** (1.0 / p) + c[_PREFILL + 4]


@kernel
def decode_seconds(c: Floats, sequences: float, context: float) -> float:
    """Return the seconds of a layer's attention for sequences over `context` tokens each."""
    keys = context if c[0] < 0.0 else min(context, c[0])
    p = c[_DECODE + 5]
    return (
        (sequences * (c[_DECODE] * (keys + c[_DECODE + 2]) + c[_DECODE + 1])) ** p
        + c[_DECODE + 4] ** p
        + (c[_DECODE + 3] * keys) ** p
    ) ** (1.0 / p)


@kernel
def outer_seconds(c: Floats, rows: float, outputs: float, first: bool, last: bool) -> float:
    """Return the seconds of embedding (first unit) and output matrix (last unit)."""
    total = 0.0
    if first:
        total += c[1] * rows + c[2]
        if c[3] > 0.0:
            total += all_reduce(c, 4, rows)
    if last:
        total += roofline(c, 7, outputs)
        if c[12] > 0.0:
            total += all_reduce(c, 13, outputs)
    return total


@kernel
def at(x: Floats, y: Floats, value: float) -> float:
    """Return a curve at a value: linear between its points, on with the last slope after them."""
    n = len(x)
    if value <= x[0] or n == 1:
        return y[0]
    low, high = 0, n - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if x[middle] < value:
            low = middle
        else:
            high = middle
    # Padding repeats the last point: go back to where the curve still moves.
    while low > 0 and x[high] == x[low]:
        low -= 1
        high -= 1
    if x[high] == x[low]:
        return y[low]
    return y[low] + (value - x[low]) * (y[high] - y[low]) / (x[high] - x[low])


@kernel
def min_layer_seconds(c: Floats, tokens: float) -> float:
    """Return the least time of a layer in a step of so many tokens with prompts."""
    return c[_LAUNCH + 1] if tokens > c[_LAUNCH + 2] else c[_LAUNCH]


@kernel
def operator_seconds(
    z: Sim,
    row: int,
    kinds: int,
    low: int,
    high: int,
    n: int,
    rows: float,
    sequences: float,
    context: float,
) -> float:
    """Return the seconds of layers [low, high) with coefficients of a row, for the first n prompts of
    `Sim.step`.

    All tokens of the step are `rows`; so many of them are of `sequences` that attend to `context` tokens in
    all.
    """
    total = 0.0
    for k in range(kinds):
        count = z.prefix[row, high, k] - z.prefix[row, low, k]
        if count == 0:
            continue
        c = z.coefficient[row, k + 1]
        one = rows_seconds(c, rows)
        if n > 0:
            one += prefill_seconds(c, n, z.step[LENGTH], z.step[CACHED])
        if sequences > 0.0:
            one += decode_seconds(c, sequences, context / sequences)
        if n > 0:
            one = max(one, min_layer_seconds(c, rows))
        total += one * count
    return total


@kernel
def layers_seconds(
    z: Sim, u: int, low: int, high: int, n: int, sequences: float, context: float
) -> float:
    """Return the seconds of layers [low, high) of a unit for the first n prompts of `Sim.step` and for
    sequences that attend to `context` tokens in all.
    """
    unit = z.unit[u]
    row = unit.row
    tokens = 0.0
    for i in range(n):
        tokens += z.step[LENGTH, i]
    total = 0.0
    if z.unit[u].kind == CURVES:
        if n > 0:
            total += at(z.curve[row, PROMPT_X], z.curve[row, PROMPT_S], tokens)
        if sequences > 0.0:
            total += at(z.curve[row, DECODE_X], z.curve[row, DECODE_S], sequences)
        if n > 0 and sequences > 0.0:
            # Both curves have it, and the step has it once.
            total -= unit.shared_s
        return total * (high - low)
    return operator_seconds(
        z, row, unit.kinds, low, high, n, tokens + sequences, sequences, context
    )


@kernel
def host_seconds(z: Sim, u: int, outputs: float) -> float:
    """Return what the host of a unit with operators takes for a step with so many outputs."""
    c = z.coefficient[z.unit[u].row, 0]
    return c[0] + c[16] * outputs


@kernel
def launch_seconds(z: Sim, u: int, tokens: float) -> float:
    """Return the least time of the layers of a unit with operators in such a step with prompts."""
    unit = z.unit[u]
    row, total = unit.row, 0.0
    for k in range(unit.kinds):
        count = z.prefix[row, unit.end, k] - z.prefix[row, unit.start, k]
        total += count * min_layer_seconds(z.coefficient[row, k + 1], tokens)
    return total


@kernel
def fixed_seconds(z: Sim, u: int, layers: int, tokens: float, outputs: float) -> float:
    """Return what a step of a unit of a model with so many layers takes beside them."""
    unit = z.unit[u]
    if unit.kind == CURVES:
        return unit.step_s + unit.token_s * tokens
    c = z.coefficient[unit.row, 0]
    return host_seconds(z, u, outputs) + outer_seconds(
        c, tokens, outputs, unit.start == 0, unit.end == layers
    )


@kernel
def whole_seconds(z: Sim, u: int, layers: int, n: int, sequences: int, context: float) -> float:
    """Return the seconds of a step in which every request runs all layers of the unit."""
    unit = z.unit[u]
    low, high = unit.start, unit.end
    d = float(sequences)
    if n > 0 or unit.kind == CURVES:
        tokens = d
        for i in range(n):
            tokens += z.step[LENGTH, i]
        fixed = fixed_seconds(z, u, layers, tokens, d + n)
        return fixed + layers_seconds(z, u, low, high, n, d, context)
    # Only attention depends on the context: the rest is the same from step to step.
    row = unit.row
    if unit.cached_rows != sequences:
        total = fixed_seconds(z, u, layers, d, d)
        for k in range(unit.kinds):
            count = z.prefix[row, high, k] - z.prefix[row, low, k]
            total += count * rows_seconds(z.coefficient[row, k + 1], d)
        unit.cached_rows = sequences
        unit.cached_s = total
    total = unit.cached_s
    for k in range(unit.kinds):
        count = z.prefix[row, high, k] - z.prefix[row, low, k]
        if count > 0:
            total += count * decode_seconds(z.coefficient[row, k + 1], d, context / d)
    return total
