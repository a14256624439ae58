"""The catalog as this machine has it: shipped facts, and the overlays that people name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from atoll.catalog.catalog import Catalog
from atoll.catalog.overlay import apply_overlay
from atoll.core.errors import InputError

OVERLAY_VARIABLE = "ATOLL_CATALOG"


def load_catalog(
    overlays: Iterable[str | os.PathLike[str]] = (), *, environ: Mapping[str, str] | None = None
) -> Catalog:
    """The shipped catalog with the overlay named by ATOLL_CATALOG, then `overlays` in order."""
    catalog = Catalog.default()
    environment = os.environ if environ is None else environ
    from_environment = environment.get(OVERLAY_VARIABLE, "").strip()
    if from_environment:
        try:
            catalog = apply_overlay(catalog, from_environment)
        except InputError as error:
            if error.line is None and error.path == from_environment:
                raise InputError(
                    error.message,
                    path=error.path,
                    field=error.field,
                    hint=f"{OVERLAY_VARIABLE} names this file; unset it or correct it",
                ) from None
            raise
    for overlay in overlays:
        catalog = apply_overlay(catalog, overlay)
    return catalog
