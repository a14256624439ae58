"""From files of measurements to a file of constants, with a progress bar on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.render import console
from atoll.core.errors import InputError
from atoll.core.files import atomic_write

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.calibrate import Fit
    from atoll.perf.constants import OpConstants
    from atoll.perf.measurements import Points


def fit_files(
    paths: Iterable[Path],
    catalog: Catalog,
    *,
    gpu: str | None,
    hold_out: bool,
    source: str | None,
) -> list[Fit]:
    """Fit every operator class of every GPU in the files; rows left out are named on stderr."""
    from rich.progress import Progress

    from atoll.perf.calibrate import fit, op_classes
    from atoll.perf.measurements import read_points

    jobs = []
    for path in paths:
        points = read_points(path)
        _report_skipped(path, points)
        for group in points.groups() or ("",):
            name = gpu or group.replace("_", "-")
            if not name:
                raise InputError("no GPU named", path=path, hint="give --gpu, or a column 'gpu'")
            kind = catalog.gpu(name)
            for op, part in op_classes(points.of(group)):
                jobs.append((op, part, kind, source or path.name))
    shown = console(stderr=True)
    # Where it cannot be redrawn, a bar is an empty line in the way of an error.
    with Progress(console=shown, transient=True, disable=not shown.is_interactive) as bar:
        return [
            fit(op, part, kind, source=origin, hold_out=hold_out)
            for op, part, kind, origin in bar.track(jobs, description="fitting")
        ]


def _report_skipped(path: Path, points: Points) -> None:
    if not len(points):
        raise InputError("no usable rows", path=path)
    if points.skipped:
        line, reason = points.skipped[0]
        console(stderr=True).print(
            f"warning: {path}: left out {len(points.skipped)} rows, first line {line}: {reason}"
        )


def write_constants(path: Path, fits: Iterable[Fit]) -> None:
    """Write fitted constants as a file that `--constants` reads on top of the shipped ones."""
    gpus: dict[str, list[str]] = {}
    for entry in fits:
        gpus.setdefault(entry.gpu, []).append(
            f"    {entry.op.value}: {constants_line(entry.constants)}"
        )
    lines = ["# Written by `atoll perf calibrate`.", "gpus:"]
    for gpu in sorted(gpus):
        lines += [f"  {gpu}:", *gpus[gpu]]
    if not os.path.isdir(path.parent):  # Path.is_dir() raises where the name is too long
        raise InputError("no such folder", path=path.parent, hint="create it first")
    atomic_write(path, "\n".join(lines) + "\n")


def constants_line(c: OpConstants) -> str:
    """Return constants as one line of YAML, defaults left out."""
    import json

    from atoll.perf.constants import OpConstants

    defaults = OpConstants()
    names = (
        "e_f",
        "e_b",
        "t0_us",
        "p",
        "pad",
        "pad_k",
        "pad_n",
        "serial_ns",
        "hot_bytes",
        "hot_gain",
    )
    fields = [
        f"{name}: {getattr(c, name):.5g}"
        for name in names
        if getattr(c, name) != getattr(defaults, name)
    ]
    fields += [f"tag: {c.tag.value}", f"source: {json.dumps(c.source)}"]
    return "{" + ", ".join(fields) + "}"
