"""`atoll profile --operators`: single operators of this machine's GPU, and the constants that they tell."""

from __future__ import annotations

import tempfile
from pathlib import Path

from atoll.cli.profile_settings import ProfileSettings
from atoll.cli.progress import bar
from atoll.core.errors import InputError, MissingDependencyError, UsageError
from atoll.core.extras import require_extras
from atoll.report.terminal import emit, note, table


def profile_operators(options: ProfileSettings) -> None:
    """Measure operators of this GPU; write an overlay with their constants, or the times themselves."""
    from importlib.util import find_spec

    from atoll.catalog.load import load_catalog
    from atoll.cli.calibrate import check_constants, fit_files, show_fits, write_constants

    out = options.out
    require_extras("engine")
    fits_here = out is None or out.suffix in (".yaml", ".yml")
    if fits_here and find_spec("scipy") is None:
        raise MissingDependencyError("scipy", "calibrate", needed_for="fitting constants")
    if out is not None and fits_here:
        check_constants(out)
    elif out is not None and out.exists() and not out.is_dir():
        raise InputError("not a folder", path=out, hint="name a folder, or an overlay (.yaml)")
    catalog = load_catalog(options.overlay)
    gpu = _name_gpu(options)
    known = catalog.gpu(gpu)
    if known.part_of is not None:
        raise UsageError("a share of a GPU tells nothing of others", field="--as")

    from atoll.runtime.local.operator_profile import OperatorProfiler, time_in_graph

    with bar("operators", 1.0) as say:
        found = OperatorProfiler(known.name, time_in_graph).measure(say)
    if out is not None and not fits_here:
        paths = found.write(out)
        counts = {path.name: len(rows) for path, rows in zip(paths, found, strict=True)}
        emit(counts, options.as_json, lambda: table(("file", "times"), list(counts.items())))
        note(f"fit them where scipy is: atoll perf calibrate {out}/*.csv -o {known.name}.yaml")
        return
    with tempfile.TemporaryDirectory() as folder:
        fits = fit_files(
            found.write(Path(folder)), catalog, gpu=None, hold_out=True, source="atoll profile"
        )
    if out is not None:
        write_constants(out, fits)
    emit(fits, options.as_json, lambda: show_fits(fits, out))


def _name_gpu(options: ProfileSettings) -> str:
    """Return the GPU's name in the catalog: as it was given, else as the driver says it."""
    import torch

    from atoll.core.ids import parse_node_type
    from atoll.runtime.join.hardware import list_gpus

    if not torch.cuda.is_available():
        raise InputError(
            "there is no GPU that torch can use", hint="run it on the machine to measure"
        )
    if "node_type" in options.model_fields_set:
        return parse_node_type(options.node_type, field="--as").gpu
    return list_gpus()[0].type
