"""Plain records in place of pydantic's, for machines that have torch but not pydantic.

The engine's messages are pydantic models; a step makes one of them. `install` lets its modules be
imported where pydantic cannot be had. Nothing is checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from typing import Any, Self


class _Missing:
    """A field without a default."""


class _Default:
    """What `Field` was told."""

    def __init__(self, default: Any = _Missing, default_factory: Any = None, **_: Any) -> None:
        self.default, self.factory = default, default_factory


class Frozen:
    """A record with the fields that its class annotates."""

    def __init__(self, **values: Any) -> None:
        for kind in reversed(type(self).__mro__):
            for name in inspect.get_annotations(kind):
                if name in values:
                    self.__dict__[name] = values[name]
                    continue
                default = kind.__dict__.get(name)
                if isinstance(default, _Default):
                    default = default.factory() if default.factory else default.default
                self.__dict__[name] = default

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """Return a copy with some fields changed."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__ | update)
        return made


def install() -> bool:
    """Import the engine with the stand-ins, if pydantic is not there; True if that was done."""
    if importlib.util.find_spec("pydantic") is not None:
        return False
    importlib.import_module("torch")
    pydantic = types.ModuleType("pydantic")
    pydantic.Field = _Default  # type: ignore[attr-defined]
    frozen = types.ModuleType("atoll.core.frozen")
    frozen.Frozen = Frozen  # type: ignore[attr-defined]
    sys.modules["atoll.core.frozen"] = frozen
    sys.modules["pydantic"] = pydantic
    try:
        importlib.import_module("atoll.engine.node_core")
    finally:
        # Other packages ask whether there is a pydantic, and there is none.
        del sys.modules["pydantic"]
    return True
