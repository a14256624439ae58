"""Speculative decoding inside the event loop: steps that check guesses, and how many of them are right.

A step checks some guesses for each running sequence, and makes one token more than were right. How many
steps an answer takes is drawn when it begins, guess for guess; from step to step its tokens then come
evenly.
"""

from __future__ import annotations

from atoll.routing.compiled import draw
from atoll.sim.sim_arrays import DRAFT, DRAFT_KINDS, DRAFT_LAYERS, LENGTH, RIGHT, Sim
from atoll.sim.sim_kernel import kernel
from atoll.sim.stepping import host_seconds, operator_seconds, outer_seconds


@kernel
def draw_steps(z: Sim, u: int, tokens: int) -> int:
    """Return in how many steps of a unit a sequence makes so many tokens."""
    unit = z.unit[u]
    if unit.guess < 0:
        return tokens
    steps, made = 0, 0
    while made < tokens:
        chance = draw(z.random[0:2])
        made += 1
        for k in range(unit.rows - 1):
            # Shares fall from one guess to the next: all before it were right as well.
            if chance >= z.guess[unit.guess, RIGHT + k]:
                break
            made += 1
        steps += 1
    return steps


@kernel
def guessing_seconds(z: Sim, u: int, n: int, sequences: int, context: float) -> float:
    """Return the seconds of a step with n prompts in which guesses are checked, and made for the next."""
    unit = z.unit[u]
    d = float(sequences)
    rows, outputs = d * unit.rows, d * unit.rows + n
    for i in range(n):
        rows += z.step[LENGTH, i]
    c = z.coefficient[unit.row, 0]
    total = host_seconds(z, u, d + n) + outer_seconds(c, rows, outputs, True, True)
    total += operator_seconds(z, unit.row, unit.kinds, unit.start, unit.end, n, rows, d, context)
    draft = int(z.guess[unit.guess, DRAFT])
    if draft < 0:
        return total
    kinds, layers = int(z.guess[unit.guess, DRAFT_KINDS]), int(z.guess[unit.guess, DRAFT_LAYERS])
    own = z.coefficient[draft, 0]
    # First over all tokens of the step, then over one of each sequence.
    total += own[0] + outer_seconds(own, rows, outputs, True, True)
    total += operator_seconds(z, draft, kinds, 0, layers, n, rows, d, context)
    one = d + n
    mean = context / d if d > 0.0 else 0.0
    more = own[0] + outer_seconds(own, one, one, True, True)
    more += operator_seconds(z, draft, kinds, 0, layers, 0, one, one, mean * one)
    rest: float = total + (unit.rows - 2) * more
    return rest
