"""From files of measurements to a file of constants, with a progress bar on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.gpus import GpuType
    from atoll.perf.calibration import Fit
    from atoll.perf.constants import OpClass, OpConstants
    from atoll.perf.measurements import Points


class _FilePart(NamedTuple):
    """Measurements in one file of one operator class of one GPU."""

    path: Path
    gpu: GpuType
    op: OpClass
    points: Points


def fit_files(
    paths: Iterable[Path],
    catalog: Catalog,
    *,
    gpu: str | None,
    hold_out: bool,
    source: str | None,
) -> list[Fit]:
    """Fit every operator class of every GPU, each to the points of all files together.

    Of a shape that several implementations ran, the fastest counts. What is left out is named on
    stderr.
    """
    from rich.progress import Progress

    jobs: dict[tuple[str, OpClass], list[_FilePart]] = {}
    for path in dict.fromkeys(paths):
        for part in _parts(path, catalog, gpu):
            jobs.setdefault((part.gpu.name, part.op), []).append(part)
    shown = console(stderr=True)
    # Where it cannot be redrawn, a bar is an empty line in the way of an error.
    with Progress(console=shown, transient=True, disable=not shown.is_interactive) as bar:
        return [
            _fit(parts, hold_out=hold_out, source=source)
            for parts in bar.track(list(jobs.values()), description="fitting")
        ]


def _parts(path: Path, catalog: Catalog, gpu: str | None) -> Iterator[_FilePart]:
    from atoll.perf.calibration import op_classes
    from atoll.perf.measurements import read_points

    points = read_points(path)
    _report_skipped(path, points)
    for group in points.groups():
        name = gpu or group.replace("_", "-")
        if not name:
            raise InputError("no GPU named", path=path, hint="give --gpu, or a column 'gpu'")
        kind = catalog.gpu(name)
        try:
            classes = op_classes(points.of(group))
        except InputError as error:
            raise error.locate(path=path) from None
        for op, part in classes:
            yield _FilePart(path, kind, op, part)


def _report_skipped(path: Path, points: Points) -> None:
    if not len(points):
        raise InputError("no usable rows", path=path)
    if points.skipped:
        line, reason = points.skipped[0]
        note(f"warning: {path}: left out {len(points.skipped)} rows, first line {line}: {reason}")
    if points.schema.kind == "attention":
        usable = len(points.of(kind="prefill")) + len(points.of(kind="decode"))
        if not usable:
            raise InputError(
                "no row says prefill or decode",
                path=path,
                field="kind",
                hint="add a column 'kind' that names the phase of every row",
            )
        if usable < len(points):
            left = len(points) - usable
            note(f"warning: {path}: left out {left} rows whose kind is neither prefill nor decode")


def _fit(parts: list[_FilePart], *, hold_out: bool, source: str | None) -> Fit:
    from atoll.perf.calibration import fit
    from atoll.perf.measurements import join_measurements

    gpu, op = parts[0].gpu, parts[0].op
    paths = dict.fromkeys(part.path for part in parts)
    measured = join_measurements([part.points for part in parts])
    points = measured.fastest()
    if len(points) < len(measured):
        note(
            f"note: {', '.join(map(str, paths))}: {op.value}: kept the fastest implementation of "
            f"every shape, left out {len(measured) - len(points)} rows"
        )
    origin = source or ", ".join(dict.fromkeys(path.name for path in paths))
    try:
        return _keep_narrow(fit(op, points, gpu, source=origin, hold_out=hold_out), gpu)
    except InputError as error:
        raise error.locate(path=", ".join(map(str, paths))) from error


def _keep_narrow(found: Fit, gpu: GpuType) -> Fit:
    """Constants of 8-bit KV caches are not measured here: they stay as shipped."""
    from dataclasses import replace

    from atoll.perf.constants import default_constants

    known = default_constants().for_gpu(gpu).op(found.op)
    kept = replace(found.constants, kv8=known.kv8, kv8_t0=known.kv8_t0)
    return replace(found, constants=kept)


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
        "kv8",
        "kv8_t0",
        "error",
    )
    fields = [
        f"{name}: {getattr(c, name):.5g}"
        for name in names
        if getattr(c, name) != getattr(defaults, name)
    ]
    fields += [f"tag: {c.tag.value}", f"source: {json.dumps(c.source)}"]
    return "{" + ", ".join(fields) + "}"
