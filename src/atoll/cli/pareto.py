"""`atoll pareto`: what a dollar buys in promises, right answers, energy and carbon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared_options import AsJson, NoCache, Overlays
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.files import atomic_write, check_target
from atoll.core.units import parse_duration
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from atoll.prove.pareto_sweep import Scaled
    from atoll.solve.solve_progress import Progress

app = typer.Typer(add_completion=False)

_SCALED: tuple[Scaled, ...] = ("both", "ttft", "tpot")


@app.command()
def pareto(
    fleet: Annotated[Path, typer.Argument(help="A fleet file of rented nodes, or problem.json.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            help="What to sweep: latency, error, energy or carbon; may be repeated. Default: latency.",
        ),
    ] = None,
    points: Annotated[int, typer.Option("--points", help="Points of each sweep, 2 to 50.")] = 7,
    scale: Annotated[
        str, typer.Option("--scale", help="Promises that latency scales: both, ttft or tpot.")
    ] = "both",
    promises: Annotated[
        bool,
        typer.Option("--promises", help="Keep promises in simulation; takes minutes a point."),
    ] = False,
    effort: Annotated[
        str, typer.Option("--effort", help="How much work to spend on each plan, as in `plan`.")
    ] = "normal",
    deadline: Annotated[
        str, typer.Option("--deadline", help="The most time that each plan may take.")
    ] = "300s",
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a page with the curves, as .html.")
    ] = None,
    no_cache: NoCache = False,
    overlay: Overlays = None,
    as_json: AsJson = False,
) -> None:
    """Plan a fleet again and again, and show what a dollar buys.

    Looser promises, more wrong answers, more energy or carbon may cost less. Every point is a plan; those
    that another one beats in both are left out of the curve. Plans are for capacity, unless --promises.
    """
    seconds = parse_duration(deadline, field="--deadline")
    if seconds <= 0:
        raise UsageError("--deadline is 0", hint="give it some time, as in 30s")
    scaled = _scaled(scale)
    if report is not None:
        check_target(report, (".html",))
        if any(report.resolve() == read.resolve() for read in (fleet, *(overlay or ()))):
            raise UsageError(f"{report} is read for this", hint="name another file to write")
    from atoll.api.fleet import Fleet
    from atoll.cli.progress import bar
    from atoll.solve.effort import Effort, parse_work
    from atoll.solve.registry import require_packages

    require_packages()
    opened = Fleet.load(fleet, overlays=overlay or ())
    with bar("pareto", 1.0) as step:

        def tell(progress: Progress) -> None:
            step(progress.share or 0.0, progress.text)

        found = opened.pareto(
            against or ["latency"],
            points=points,
            promises=promises,
            scaled=scaled,
            effort=Effort(cached=not no_cache, work=parse_work(effort)),
            deadline_s=seconds,
            on_progress=tell,
        )
    from atoll.report.pareto_report import draw_pareto, render_pareto_page

    if report is not None:
        atomic_write(report, render_pareto_page(found))
    emit(found, as_json, lambda: draw_pareto(found))
    if report is not None:
        note(f"wrote {report}")


def _scaled(text: str) -> Scaled:
    found = next((name for name in _SCALED if name == text), None)
    if found is None:
        raise UnknownNameError("promise to scale", text, _SCALED)
    return found
