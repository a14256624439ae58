"""Errors that carry fields, print as one line and map to a process exit code.

Raise the most specific type; handle it once, at the edge (the command line, an HTTP handler).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import ClassVar, Self

_KNOWN_SHOWN = 24
_NAME_SHOWN = 60
_PLACE_SHOWN = 240


def _one_line(text: str) -> str:
    return " ".join(text.split())


def shorten(text: str, max_letters: int = _NAME_SHOWN) -> str:
    """Return text of at most `max_letters` characters, with "..." for the middle of longer text."""
    if len(text) <= max_letters:
        return text
    tail = max_letters // 3
    return f"{text[: max_letters - 3 - tail]}...{text[len(text) - tail :]}"


def _rebuild(
    cls: type[AtollError], args: tuple[object, ...], state: dict[str, object]
) -> AtollError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class AtollError(Exception):
    """A failure with a reader: what is wrong, in which field, and what to change.

    `str()` is always one line, "message (fix: hint)". `exit_code` is what the command line returns.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = _one_line(message)
        self.hint = _one_line(hint) if hint else None
        self.field = _one_line(field) if field else None

    def _where(self) -> str:
        return f"{shorten(self.field, _PLACE_SHOWN)}: " if self.field else ""

    def __str__(self) -> str:
        fix = f" (fix: {self.hint})" if self.hint else ""
        return f"{self._where()}{self.message}{fix}"

    def __reduce__(
        self,
    ) -> tuple[object, tuple[type[Self], tuple[object, ...], dict[str, object]]]:
        # The default calls cls(*args), which fails for keyword-only fields; errors must cross
        # process pools with every field intact.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class UsageError(AtollError):
    """The command or function was called in a way that cannot work."""

    exit_code = 2


class InputError(AtollError):
    """A value in a file or argument is wrong; knows the file, the line and the field if any."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, field=field)
        self.path = os.fspath(path) if path is not None else None
        self.line = line

    def _where(self) -> str:
        if self.path is not None:
            # `path` itself stays as it is: a folder may be called anything, even two lines.
            shown = shorten(_one_line(self.path), _PLACE_SHOWN)
            place = shown if self.line is None else f"{shown}:{self.line}"
        else:
            place = "" if self.line is None else f"line {self.line}"
        return (f"{place}: " if place else "") + super()._where()

    def locate(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> InputError:
        """Return a copy that fills in whichever of path, line and field is still unknown."""
        return InputError(
            self.message,
            path=self.path if self.path is not None else path,
            line=self.line if self.line is not None else line,
            field=self.field if self.field is not None else field,
            hint=self.hint,
        )


class UnknownNameError(AtollError):
    """A name that is not in a known set; suggests those written most like it, or what `nearest` names."""

    exit_code = 4

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        field: str | None = None,
        hint: str | None = None,
        nearest: tuple[str, ...] = (),
    ) -> None:
        names = tuple(sorted(set(known), key=lambda n: (n.lower(), n)))
        self.kind = kind
        self.name = name
        self.known = names
        self._by_kind = bool(nearest)
        self.suggestions = nearest or _nearest(name, names)
        if hint is None and not names:
            hint = f"there is no {kind} yet; make one first"
        super().__init__(self._describe(), field=field, hint=hint)

    def _describe(self) -> str:
        text = f"unknown {self.kind} {shorten(self.name)!r}"
        if self._by_kind:
            text += f"; nearest to it: {', '.join(map(shorten, self.suggestions))}"
        elif self.suggestions:
            text += f"; did you mean {' or '.join(map(shorten, self.suggestions))}?"
        if not self.known:
            return f"{text}; none are known"
        shown = ", ".join(map(shorten, self.known[:_KNOWN_SHOWN]))
        more = len(self.known) - _KNOWN_SHOWN
        # A question mark already ends the suggestion.
        separator = " " if self.suggestions and not self._by_kind else "; "
        return f"{text}{separator}known: {shown}" + (f" and {more} more" if more > 0 else "")


def _nearest(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    # Nothing that long is a slip of the pen, and comparing it costs time.
    if len(name) > _PLACE_SHOWN:
        return ()
    # Compared without case: "h100" for "H100" is the commonest slip of all.
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower.setdefault(candidate.lower(), candidate)
    close = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    return tuple(by_lower[lower] for lower in close)


class InfeasibleError(AtollError):
    """The question is well formed and has no answer (no plan meets the demand, say)."""

    exit_code = 5


class MissingDependencyError(AtollError):
    """An optional package is needed; says which extra installs it."""

    exit_code = 6

    def __init__(self, package: str, extra: str, *, needed_for: str | None = None) -> None:
        self.package = package
        self.extra = extra
        what = needed_for or "this"
        super().__init__(
            f"{what} needs the package {package!r}, which is not installed",
            hint=f"pip install 'atoll[{extra}]'",
        )


class NoCommandError(AtollError):
    """An instance of a plan has no command that would start it."""

    exit_code = 8


class InternalError(AtollError):
    """Atoll broke one of its own promises; always a bug in Atoll."""

    exit_code = 70
