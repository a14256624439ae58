"""Which promises are kept: the first thing to know of a plan or a run, a line for each service.

Lines of groups of requests (`plan.request_groups`) that fall short, or are too small to judge, follow that of
their service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.units import format_share
from atoll.report.render import Grid

if TYPE_CHECKING:
    from rich.text import Text

    from atoll.plan.kept_groups import KeptGroup
    from atoll.plan.plan import KeptPromise, Plan
    from atoll.plan.problem import Problem
    from atoll.sim.sim_result import SimReport

_IN_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "ahead": "speech ahead", "image": "image"}


@dataclass(frozen=True)
class PromiseVerdict:
    """Whether a service keeps its promises, in a line; None where nothing was found out.

    `kept` and `target` are the shares of requests that keep them and that should, where the line is of those.
    """

    text: str
    is_kept: bool | None
    kept: float | None = None
    target: float | None = None


def judge_plan(plan: Plan) -> list[PromiseVerdict]:
    """Return what simulation found of the promises of a plan; nothing where only capacity was planned."""
    return [
        verdict
        for promise in plan.promises
        for verdict in (
            _judge_promise(promise),
            *judge_kept_groups(promise.service, promise.groups),
        )
    ]


def _judge_promise(promise: KeptPromise) -> PromiseVerdict:
    between = f"{format_share(promise.low)} to {format_share(promise.high)}"
    text = say_kept(promise.service, promise.kept, promise.target, promise.kept >= promise.target)
    text += f", simulated: {between} with 95% confidence"
    after = promise.kept_after_loss
    if after is not None:
        only = "" if after >= promise.target else "only "
        text += f"; for {only}{format_share(after)} with the node lost that hurts most"
        if promise.groups_after_loss:
            text += f" ({say_groups(promise.groups_after_loss)})"
    if promise.chance is not None:
        text += (
            f"; {format_share(promise.chance)} likely, the performance model being off as it may"
        )
    if promise.groups:
        text += f"; {say_groups(promise.groups)}"
    if not promise.is_kept:
        text += f"; TTFT {format_share(promise.kept_ttft)}, TPOT {format_share(promise.kept_tpot)}"
        if promise.cause:
            text += f". Why: {promise.cause}"
    return PromiseVerdict(text, promise.is_kept, promise.kept, promise.target)


def judge_run(report: SimReport, problem: Problem) -> list[PromiseVerdict]:
    """Return how many requests of each service kept their promises in a run, where it had any."""
    verdicts = []
    for service in report.services:
        target, kept = problem.service(service.name).target, service.attainment
        if kept is None:
            if service.requests:
                text = f"{service.name}: no request was judged, none had ended or was late"
                verdicts.append(PromiseVerdict(text, None))
            continue
        text = say_kept(service.name, kept, target, kept >= target)
        if kept < target:
            ttft, tpot = service.attainment_ttft or 0.0, service.attainment_tpot or 0.0
            text += f": TTFT {format_share(ttft)}, TPOT {format_share(tpot)}"
        if service.groups:
            text += f"; {say_groups(service.groups)}"
        is_kept = kept >= target and all(group.is_kept is not False for group in service.groups)
        verdicts.append(PromiseVerdict(text, is_kept, kept, target))
        verdicts += judge_kept_groups(service.name, service.groups)
    return verdicts


def say_groups(groups: Sequence[KeptGroup]) -> str:
    """Return the least of what groups of requests keep, in words."""
    known = [group for group in groups if group.kept is not None]
    if not known:
        return "none of its groups of requests was judged"
    least = min(known, key=lambda group: (group.kept or 0.0) - group.target)
    return f"of {least.name} {format_share(least.kept or 0.0)}, the least of {len(groups)} groups"


def judge_kept_groups(service: str, groups: Sequence[KeptGroup]) -> list[PromiseVerdict]:
    """Return a line for each group of which too few requests keep their promises, or too few came to tell."""
    return [
        PromiseVerdict(f"{service}, {say_group(group)}", group.is_kept)
        for group in groups
        if not group.is_kept
    ]


def say_group(group: KeptGroup) -> str:
    """Return in words what a group of requests keeps of its promises, and how sure that is."""
    if group.kept is None:
        return f"{group.name}: no request was judged"
    only = "only " if group.is_kept is False else ""
    text = (
        f"{group.name}: kept for {only}{format_share(group.kept)} of {group.requests:,} requests "
        f"({format_share(group.target)} promised), {format_share(group.low)} to "
        f"{format_share(group.high)} with 95% confidence"
    )
    if group.is_kept is None:
        return f"{text}: too few to tell"
    if group.is_kept or not group.each:
        return text
    each = (f"{_IN_WORDS[name]} {format_share(share)}" for name, share in group.each.items())
    return f"{text}; {', '.join(each)}"


def describe_groups(groups: Sequence[KeptGroup]) -> list[dict[str, object]]:
    """Return groups of requests as plain data, with whether they keep their promises (None: too few)."""
    return [{**group.model_dump(mode="json"), "is_kept": group.is_kept} for group in groups]


def list_plan_groups(plan: Plan) -> Grid:
    """Return a row for each group of requests of a plan's services."""
    return list_kept_groups((promise.service, promise.groups) for promise in plan.promises)


def list_kept_groups(kept: Iterable[tuple[str, Sequence[KeptGroup]]]) -> Grid:
    """Return a row for each group of requests, by service: what it keeps, and how sure that is."""
    words = {True: "yes", False: "no", None: "too few to tell"}
    return Grid.of(
        ((service, group) for service, groups in kept for group in groups),
        {
            "service": lambda one: one[0],
            "requests of": lambda one: one[1].name,
            "judged": lambda one: f"{one[1].requests:,}",
            "kept": lambda one: "-" if one[1].kept is None else format_share(one[1].kept),
            "95% confidence": lambda one: (
                f"{format_share(one[1].low)} to {format_share(one[1].high)}"
            ),
            "promised": lambda one: format_share(one[1].target),
            "enough": lambda one: words[one[1].is_kept],
        },
        right=("judged", "kept", "promised"),
    )


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
