"""Which promises are kept: the first thing to know of a plan or a run, a line for each service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.units import format_share

if TYPE_CHECKING:
    from rich.text import Text

    from atoll.plan.plan import KeptPromise, Plan
    from atoll.plan.problem import Problem
    from atoll.sim.sim_result import SimReport


@dataclass(frozen=True)
class PromiseVerdict:
    """Whether a service keeps its promises, in a line; None where nothing was found out."""

    text: str
    is_kept: bool | None


def judge_plan(plan: Plan) -> list[PromiseVerdict]:
    """Return what simulation found of the promises of a plan; nothing where only capacity was planned."""
    return [_judge_promise(promise) for promise in plan.promises]


def _judge_promise(promise: KeptPromise) -> PromiseVerdict:
    between = f"{format_share(promise.low)} to {format_share(promise.high)}"
    text = say_kept(promise.service, promise.kept, promise.target, promise.kept >= promise.target)
    text += f", simulated: {between} with 95% confidence"
    after = promise.kept_after_loss
    if after is not None:
        only = "" if after >= promise.target else "only "
        text += f"; for {only}{format_share(after)} with the node lost that hurts most"
    if promise.chance is not None:
        text += (
            f"; {format_share(promise.chance)} likely, the performance model being off as it may"
        )
    if not promise.is_kept:
        text += f"; TTFT {format_share(promise.kept_ttft)}, TPOT {format_share(promise.kept_tpot)}"
        if promise.cause:
            text += f". Why: {promise.cause}"
    return PromiseVerdict(text, promise.is_kept)


def judge_run(report: SimReport, problem: Problem) -> list[PromiseVerdict]:
    """Return how many requests of each service kept their promises in a run, where it had any."""
    verdicts = []
    for service in report.services:
        target, kept = problem.service(service.name).attainment, service.attainment
        if kept is None:
            if service.requests:
                text = f"{service.name}: no request was judged, none had ended or was late"
                verdicts.append(PromiseVerdict(text, None))
            continue
        text = say_kept(service.name, kept, target, kept >= target)
        if kept < target:
            ttft, tpot = service.attainment_ttft or 0.0, service.attainment_tpot or 0.0
            text += f": TTFT {format_share(ttft)}, TPOT {format_share(tpot)}"
        verdicts.append(PromiseVerdict(text, kept >= target))
    return verdicts


def draw_verdicts(verdicts: Sequence[PromiseVerdict]) -> list[Text]:
    """Return the lines for a terminal: green where promises are kept, red where not."""
    from rich.text import Text

    styles = {True: "bold green", False: "bold red", None: "bold"}
    return [Text(verdict.text, style=styles[verdict.is_kept]) for verdict in verdicts]


def say_kept(service: str, kept: float, target: float, is_kept: bool) -> str:
    """Return in words for which share of its requests a service keeps its promises."""
    # In words, too: not everybody sees red and green, and files have no colours.
    only = "" if is_kept else "only "
    return (
        f"{service} keeps its promises for {only}{format_share(kept)} of requests "
        f"({format_share(target)} promised)"
    )
