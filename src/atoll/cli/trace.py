"""`atoll trace`: look at workloads, draw them, and turn trace files into other formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared_options import AsJson
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from atoll.workload.requests import Requests, Workload
    from atoll.workload.stats import Summary
    from atoll.workload.trace_reading import RowReport

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Describe, generate and convert workloads: traces, built-ins, or drawn from words.",
)

Spec = Annotated[
    str,
    typer.Argument(
        help='A trace file, a built-in (azure-conv@10/s), or "poisson:10/s lengths=1024x128 for=10min".'
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed, the same requests.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail at the first bad row of a file.")]
BadLimit = Annotated[
    int, typer.Option("--bad-limit", min=0, help="Fail after this many bad rows of a file.")
]
Out = Annotated[
    list[Path] | None,
    typer.Option("-o", "--out", help="Also write a .png or .html; repeatable."),
]
_BAD_LIMIT = 1_000
_LINES_SHOWN = 5


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the built-in workloads."""
    from atoll.workload.builtin import NAMES, get_builtin

    rows = []
    for name in NAMES:
        trace = get_builtin(name)
        mix = trace.lengths.mix()
        rows.append(
            {
                "name": name,
                "rate_per_s": trace.rate_per_s,
                "input_mean": mix.input_mean,
                "output_mean": mix.output_mean,
                "about": trace.about,
            }
        )
    columns = ("name", "requests/s", "prompt", "answer", "follows")
    cells = [
        (
            row["name"],
            f"{row['rate_per_s']:.3g}",
            f"{row['input_mean']:,.0f}",
            f"{row['output_mean']:,.0f}",
            row["about"],
        )
        for row in rows
    ]
    emit(rows, as_json, lambda: table(columns, cells, right=columns[1:4]))


@app.command()
def describe(
    spec: Spec,
    seed: Seed = 0,
    out: Out = None,
    strict: Strict = False,
    bad_limit: BadLimit = _BAD_LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show rate, burstiness and lengths of a workload, with pictures.

    A built-in without an end is described over a million requests (burstgpt over 61 days), beside what
    was measured.
    """
    from atoll.report.trace_report import compare_statistics, describe_stats, draw_trace, plot_trace
    from atoll.workload.builtin import NAMES, get_builtin
    from atoll.workload.spec import workload_of
    from atoll.workload.stats import summarise

    pure, bounded = spec.strip() in NAMES, spec
    if pure:
        # What happens once a day needs more days than so many requests take.
        bounded += " n=1M" if get_builtin(spec.strip()).curve is None else " for=61d"
    workload = workload_of(bounded, strict=strict, bad_limit=bad_limit)
    summary = summarise(workload.chunks(seed))
    stats = summary.stats()
    match = compare_statistics(spec.strip(), summary) if pure else ()
    pictures = plot_trace(summary)
    if out:
        from atoll.report.charts import save_all

        save_all(out, pictures, title=workload.name, facts=describe_stats(stats))
    data = {
        "workload": workload.name,
        "stats": stats,
        "match": match,
        "files": _reports(workload),
        "pictures": pictures,
    }
    emit(data, as_json, lambda: draw_trace(workload.name, stats, match, pictures))
    say_rows(workload)
    for path in out or ():
        note(f"wrote {path}")


@app.command()
def generate(
    spec: Spec,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="A .csv or .jsonl file, or one with .gz after it."),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Write the requests of a workload to a file, or as CSV to standard output."""
    from atoll.core.errors import UsageError
    from atoll.workload.spec import workload_of

    if out is None and as_json:
        raise UsageError("--json describes the file that is written", hint="name it with -o FILE")
    workload = workload_of(spec)
    if out is None:
        from atoll.workload.writing import csv_lines

        for _, text in csv_lines(workload.chunks(seed)):
            sys.stdout.write(text)
        say_rows(workload)
        return
    _write(workload, out, seed, as_json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A trace file.")],
    target: Annotated[
        Path, typer.Argument(help="A .csv or .jsonl file, or one with .gz after it.")
    ],
    kind: Annotated[
        str | None,
        typer.Option("--format", help="Its format, where the first line does not tell."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", help="Replay at this rate (10/s), or x2 for twice as fast."),
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="What stays at another rate: gaps or clock.")
    ] = "gaps",
    seed: Seed = 0,
    strict: Strict = False,
    bad_limit: BadLimit = _BAD_LIMIT,
    as_json: AsJson = False,
) -> None:
    """Turn a trace file into another format, at its own rate or another."""
    from atoll.workload.spec import replay_of

    workload = replay_of(
        str(source), rate, kind=kind, keep=keep, strict=strict, bad_limit=bad_limit
    )
    _write(workload, target, seed, as_json)


def _write(workload: Workload, out: Path, seed: int, as_json: bool) -> None:
    from atoll.core.files import check_target
    from atoll.report.charts import draw_facts
    from atoll.report.trace_report import describe_stats
    from atoll.workload.stats import Summary
    from atoll.workload.writing import target_format, write_trace

    kind = target_format(out)
    check_target(out)
    summary = Summary()
    count = write_trace(out, _watch(workload.chunks(seed), summary))
    stats = summary.stats() if count else None
    data = {
        "workload": workload.name,
        "wrote": out,
        "format": kind,
        "requests": count,
        "stats": stats,
        "files": _reports(workload),
    }
    facts = {} if stats is None else describe_stats(stats)
    emit(data, as_json, lambda: draw_facts(f"{workload.name} -> {out}", facts))
    say_rows(workload)
    note(f"wrote {out}")


def _watch(chunks: Iterator[Requests], summary: Summary) -> Iterator[Requests]:
    for chunk in chunks:
        summary.add(chunk)
        yield chunk


def _reports(workload: Workload) -> tuple[RowReport, ...]:
    """Return what became of the rows of every file that a workload reads."""
    from atoll.workload.synthetic import Mixed
    from atoll.workload.traces import TraceReplay

    if isinstance(workload, Mixed):
        return tuple(report for part in workload.parts for report in _reports(part))
    return (workload.trace.report,) if isinstance(workload, TraceReplay) else ()


def say_rows(workload: Workload) -> None:
    """Say what became of the rows of every file that a workload has read, where there is something to say."""
    for report in _reports(workload):
        if report.bad:
            for reason, count in report.reasons.items():
                note(f"{report.path}: {count:,} of {report.rows:,} rows are bad: {reason}")
            shown = "; ".join(
                f"line {line}: {what}" for line, what in report.examples[:_LINES_SHOWN]
            )
            note(f"{report.path}: bad rows: {shown}{'; ...' if report.bad > _LINES_SHOWN else ''}")
        for reason, count in report.left_out.items():
            note(f"{report.path}: left out {count:,} of {report.rows:,} rows: {reason}")
        if report.is_mixed:
            note(
                f"{report.path}: times are of several time zones ({', '.join(report.zones)}) and were "
                "converted to UTC"
            )
        if report.reordered:
            note(f"{report.path}: {report.reordered:,} rows were out of order and are sorted")
        if report.ignored_columns:
            note(f"{report.path}: ignored columns: {', '.join(report.ignored_columns)}")
