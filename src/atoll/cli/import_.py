"""`atoll import`: fleet files and problems from the files of other systems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import UsageError
from atoll.core.files import check_target
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.plan.problem import Problem

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def root() -> None:
    """Turn other systems' cluster files into fleet files."""


@app.command()
def helix(
    source: Annotated[
        Path, typer.Argument(help="A Helix cluster .ini, or a folder with one such file.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="A fleet file (.yaml) or problem (.json) to write.")
    ],
    model: Annotated[
        str, typer.Option("--model", help="A model of the node profiles.")
    ] = "LLaMA-2-70B",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of node_profiles.json; beside or above the cluster."),
    ] = None,
    tables: Annotated[
        bool,
        typer.Option(
            "--tables", help="Take tokens/s from throughput_tables.json, not the profiles."
        ),
    ] = False,
) -> None:
    """Import a cluster of the Helix repository: machines, links and measured profiles.

    A fleet file gets its profiles in a file of its own beside it, NAME.profiles.json.
    """
    from atoll.core.files import atomic_write
    from atoll.plan.files.helix import helix_problem

    check_target(out, (".yaml", ".yml", ".json"))
    problem = helix_problem(_cluster_file(source), model=model, data=data, tables=tables)
    if out.suffix.lower() == ".json":
        atomic_write(out, problem.to_json(indent=2) + "\n")
    else:
        from atoll.plan.files.fleet_text import fleet_text, profiles_text

        profiles = out.with_name(f"{out.stem}.profiles.json")
        atomic_write(profiles, profiles_text(problem))
        atomic_write(out, fleet_text(problem, profiles.name))
        note(f"wrote {profiles}")
    note(f"wrote {out}: {_size(problem)}")


def _cluster_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    paths = sorted(source.glob("*.ini"))
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths[:8]) or "none"
        raise UsageError(f"{source} has {len(paths)} .ini files: {names}", hint="name one of them")
    return paths[0]


def _size(problem: Problem) -> str:
    cluster = problem.cluster
    counts = {} if cluster is None else cluster.counts()
    return ", ".join(f"{n}x {kind}" for kind, n in sorted(counts.items()))
