"""Requests/s of parts that make tokens, from the capacity models of plain llms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.step import Position

if TYPE_CHECKING:
    from atoll.perf.components.sites import ExecutorSite
    from atoll.workload.classes import RequestClass

NO_PROMISE_S = 86_400.0
"""Stands for a promise where there is none: a day."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Requests/s of one copy, 0 where the promise cannot be kept, and what bounds them."""

    requests_per_s: float
    limit: str


def token_rate(site: ExecutorSite, klass: RequestClass, part: str, budget_s: float) -> TokenRate:
    """Return what one copy carries of a class at a part that makes tokens.

    `budget_s` is the part's share of the time to the first token, or for a talker of the time until all codes
    must be there.
    """
    model, lengths = site.models[part], site.lengths(klass, part)
    first_s, token_s = min(budget_s, NO_PROMISE_S), klass.tpot_s or NO_PROMISE_S
    if part in site.talkers:
        first_s, token_s = NO_PROMISE_S, min(budget_s / lengths.output_mean, NO_PROMISE_S)
    phase = site.phase(part)
    spec = model.spec
    if phase is Phase.BOTH:
        prompts = RoleLoad("prompts", spec, Phase.PREFILL, first_s, lengths, together=True)
        answers = RoleLoad("answers", spec, Phase.DECODE, token_s, lengths, together=True)
        mixed = MixedCapacityModel(prompts, answers, model, waits=first_s < NO_PROMISE_S)
        rate = float(mixed.throughputs([1], [Position.WHOLE])[0, 0, spec.layers])
        return TokenRate(rate, mixed.limit())
    promise = first_s if phase is Phase.PREFILL else token_s
    role = RoleLoad(phase.value, spec, phase, promise, lengths)
    found = CapacityModel(role, model).detail(spec.layers, 1, promise, Position.WHOLE)
    per_request = lengths.input_mean if phase is Phase.PREFILL else lengths.output_mean
    return TokenRate(found.throughput / per_request, found.limit)
