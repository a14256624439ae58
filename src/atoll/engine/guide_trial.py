"""Guides that may take for ever to compile are tried first in a process that may die of it.

Most schemas compile in a millisecond. Some that are short take hours: intersections of patterns grow
exponentially, and llguidance has no limit for them. A process of its own (`guide_compiler`), with so much CPU
time for each guide and so much memory, shows whether a guide can be compiled, before the instance and its
nodes do it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from atoll.core.request_parameters import OutputFormat

_HARMLESS = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"}
    | {"minItems", "maxItems", "description", "title", "default", "$schema", "x-guidance", "$defs"}
)
"""Keywords that cannot make a schema grow beyond its length."""


def is_harmless(schema: Any) -> bool:
    """Return whether a schema compiles in about the time it takes to read it."""
    if isinstance(schema, list):
        return all(is_harmless(part) for part in schema)
    if not isinstance(schema, dict):
        return True
    for key, value in schema.items():
        if key not in _HARMLESS:
            return False
        if key in ("properties", "$defs") and isinstance(value, dict):
            if not all(is_harmless(part) for part in value.values()):
                return False
        elif key not in ("enum", "const", "default", "x-guidance") and not is_harmless(value):
            return False
    return True


class GuideTrial:
    """A process that compiles guides of one model; started when it is first needed, and after each death."""

    def __init__(self, folder: Path, vocabulary: int, eos: tuple[int, ...]) -> None:
        self._command = [
            *(sys.executable, "-m", "atoll.engine.guide_compiler"),
            *(str(folder), str(vocabulary), *map(str, eos)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, guide: OutputFormat) -> str | None:
        """Return why a guide cannot be compiled, or not in time; None if it can. Takes seconds at worst."""
        asked = json.dumps([guide.kind, guide.text]).encode() + b"\n"
        with self._lock:
            answer = self._ask(asked)
        if answer is None:
            return "the guide is too complex to be followed: combine fewer patterns"
        return answer or None

    def _ask(self, asked: bytes) -> str | None:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(OSError):
            process.stdin.write(asked)
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return str(json.loads(line))
        # The kernel has ended it.
        self.close()
        return None

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                process.wait()
