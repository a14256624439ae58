"""`atoll pareto`: what a dollar buys in promises, right answers, energy and carbon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.options import (
    VerbSettings,
    argument,
    json_field,
    no_cache_field,
    overlay_field,
    verb,
)
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.files import atomic_write, check_target
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from atoll.prove.pareto_sweep import Scaled
    from atoll.solve.solve_progress import Progress

app = typer.Typer(add_completion=False)

_SCALED: tuple[Scaled, ...] = ("both", "ttft", "tpot")


class ParetoSettings(VerbSettings):
    """Options of `atoll pareto`."""

    fleet: Path = argument("A fleet file of rented nodes, or problem.json.")
    against: tuple[str, ...] = option(
        ("latency",),
        "What to sweep: latency, error, energy or carbon; may be repeated. Default: latency.",
    )
    points: int = option(7, "Points of each sweep, 2 to 50.")
    scale: str = option("both", "Promises that latency scales: both, ttft or tpot.")
    promises: bool = option(False, "Keep promises in simulation; takes minutes a point.")
    effort: str = option("normal", "How much work to spend on each plan, as in `plan`.")
    deadline: Duration = option("300s", "The most time that each plan may take.")
    report: Path | None = option(None, "Write a page with the curves, as .html.")
    no_cache: bool = no_cache_field()
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


@verb(app, ParetoSettings)
def pareto(options: ParetoSettings) -> None:
    """Plan a fleet again and again, and show what a dollar buys.

    Looser promises, more wrong answers, more energy or carbon may cost less. Every point is a plan; those
    that another one beats in both are left out of the curve. Plans are for capacity, unless --promises.
    """
    if options.deadline <= 0:
        raise UsageError("--deadline is 0", hint="give it some time, as in 30s")
    scaled, report = _scaled(options.scale), options.report
    if report is not None:
        check_target(report, (".html",))
        if any(report.resolve() == read.resolve() for read in (options.fleet, *options.overlay)):
            raise UsageError(f"{report} is read for this", hint="name another file to write")
    from atoll.api.fleet import Fleet
    from atoll.cli.progress import bar
    from atoll.solve.effort import Effort, parse_work
    from atoll.solve.registry import require_packages

    require_packages()
    opened = Fleet.load(options.fleet, overlays=options.overlay)
    with bar("pareto", 1.0) as step:

        def tell(progress: Progress) -> None:
            step(progress.share or 0.0, progress.text)

        found = opened.pareto(
            options.against,
            points=options.points,
            promises=options.promises,
            scaled=scaled,
            effort=Effort(cached=not options.no_cache, work=parse_work(options.effort)),
            deadline_s=options.deadline,
            on_progress=tell,
        )
    from atoll.report.pareto_report import draw_pareto, render_pareto_page

    if report is not None:
        atomic_write(report, render_pareto_page(found))
    emit(found, options.as_json, lambda: draw_pareto(found))
    if report is not None:
        note(f"wrote {report}")


def _scaled(text: str) -> Scaled:
    found = next((name for name in _SCALED if name == text), None)
    if found is None:
        raise UnknownNameError("promise to scale", text, _SCALED)
    return found
