"""A field that is also an option of a command: declared once, where it is checked.

`atoll.cli.options` makes commands of models with such fields, and says what the properties mean that only a
command line needs.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

CORS_HELP = "Pages of this origin may ask from a browser; * for all; may be repeated."
CONFIG_HELP = (
    "More settings of the gateway, as `atoll gateway --config` has them: deadlines, health, ..."
)
_SHOWN = ("argument", "env", "file", "flag", "metavar", "panel")


def option(default: Any, description: str, *flags: str, **more: Any) -> Any:
    """Return a field that is an option; `more` are its checks, and how a command line shows it."""
    shown = {name: more.pop(name) for name in _SHOWN if name in more}
    if flags:
        shown["flag"] = list(flags)
    # Quantities are written as text ("10min"), which is read when it counts.
    more.setdefault("validate_default", isinstance(default, str))
    return Field(default, description=description, json_schema_extra=shown or None, **more)
