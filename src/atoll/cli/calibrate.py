"""From files of measurements to constants in an overlay, with a progress bar on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.report.terminal import console, note, table

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def check_constants(path: Path) -> dict[str, dict[str, str]]:
    """Return the constants that a file of `write_constants` has, as lines of YAML by GPU and class.

    InputError where it cannot be written, or has something else, which would be lost.
    """
    from atoll.catalog.document import Document
    from atoll.core.files import check_target, load_yaml
    from atoll.perf.constants import read_constants

    check_target(path, (".yaml", ".yml"))
    if not path.exists():
        return {}
    data: Any = load_yaml(path)
    overlay = Document(path).overlay
    if set(data or ()) - {"gpus"} or any(set(own) - {"operators"} for own in data["gpus"].values()):
        raise InputError(
            "an overlay with other facts",
            path=path,
            hint="name another file; --overlay may be repeated",
        )
    return {
        gpu: {op: constants_line(read_constants(one)) for op, one in (own.operators or {}).items()}
        for gpu, own in (overlay.gpus or {}).items()
    }


def write_constants(path: Path, fits: Iterable[Fit]) -> None:
    """Write fitted constants as an overlay, beside those of other GPUs and classes that it has."""
    gpus = check_constants(path)
    for entry in fits:
        gpus.setdefault(entry.gpu, {})[entry.op.value] = constants_line(entry.constants)
    lines = ["# Written by `atoll perf calibrate`.", "gpus:"]
    for gpu, ops in sorted(gpus.items()):
        lines += [f"  {gpu}:", "    operators:"]
        lines += [f"      {op}: {line}" for op, line in ops.items()]
    atomic_write(path, "\n".join(lines) + "\n")


def show_fits(fits: list[Fit], out: Path | None) -> RenderableType:
    """Draw fits and what to do with them."""
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            fit.gpu,
            fit.op.value,
            fit.fitted.points,
            f"{fit.fitted.median:.1f}",
            f"{fit.fitted.p95:.1f}",
            None if fit.held_out is None else f"{fit.held_out.median:.1f}",
            None if fit.held_out is None else f"{fit.held_out.p95:.1f}",
            f"{fit.constants.e_f:.3f}",
            f"{fit.constants.e_b:.3f}",
        )
        for fit in fits
    ]
    columns = (
        "gpu", "operator", "points", "error %", "p95 %", "held-out %", "held-out p95 %", "e_f", "e_b",
    )  # fmt: skip
    used = (
        f"Wrote {out}; plan and simulate with it: --overlay {out}, or catalog: of a fleet file."
        if out is not None
        else "Nothing written: give -o FILE to keep these constants."
    )
    # Below the table, not its caption: a name folded to the width of the table cannot be copied.
    return Group(table(columns, rows, right=columns[2:]), Text(used))


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
