"""Reading a parsed config field by field; a wrong type or value is an InputError naming it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from atoll.catalog.name_lookup import printable
from atoll.core.errors import InputError

# Above this no product of two fields can leave the range where floats count exactly.
_MAX_WHOLE = 1 << 26
"""Largest number that a field takes."""


def check_whole(
    name: str, value: object, *, min_value: int = 1, max_value: int = _MAX_WHOLE
) -> None:
    """Raise an InputError naming the field unless the value is a whole number in this range."""
    if isinstance(value, bool) or not isinstance(value, int) or not min_value <= value <= max_value:
        raise InputError(
            f"{value!r} is not a whole number from {min_value} to {max_value}", field=name
        )


class ConfigFields:
    """A mapping read with types; every method names the field if its value is wrong."""

    def __init__(
        self,
        data: Mapping[str, object],
        *,
        path: str | os.PathLike[str] | None = None,
        prefix: str = "",
    ) -> None:
        self._data = data
        self._path = path
        self._prefix = prefix

    def error(self, message: str, name: str, hint: str | None = None) -> InputError:
        """An error about one field of this mapping."""
        field = printable(f"{self._prefix}{name}")
        return InputError(message, path=self._path, field=field, hint=hint)

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigFields:
        """These fields, and the defaults for those that are absent or null."""
        if not defaults:
            return self
        given = {key: value for key, value in self._data.items() if value is not None}
        return ConfigFields({**defaults, **given}, path=self._path, prefix=self._prefix)

    def names(self) -> tuple[str, ...]:
        """The field names present."""
        return tuple(self._data)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._data.get(name) is not None

    def required(self, name: str, *, max_value: int = _MAX_WHOLE) -> int:
        """A whole number of at least 1 that must be there."""
        if not self.has(name):
            raise self.error("this field is required", name)
        return self._check(name, self._data[name], 1, max_value)

    def whole(
        self, name: str, *, default: int, min_value: int = 0, max_value: int = _MAX_WHOLE
    ) -> int:
        """A whole number, `default` if absent or null."""
        return (
            self._check(name, self._data[name], min_value, max_value) if self.has(name) else default
        )

    def optional(self, name: str) -> int | None:
        """A whole number of at least 1, None if absent or null."""
        return self.required(name) if self.has(name) else None

    def group(self, name: str, *, default: int | None) -> int | None:
        """A quantisation group size: a whole number, -1 or null for one scale per channel."""
        value = self._data.get(name, default)
        if value is None or (value == -1 and not isinstance(value, bool)):
            return None
        return self._check(name, value, 1, _MAX_WHOLE)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false, `default` if absent or null."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{_short(value)} is not true or false", name)
        return value

    def text(self, name: str) -> str | None:
        """A string, None if absent or null."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{_short(value)} is not text", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty if absent or null."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{_short(value)} is not a list of texts", name)
        return tuple(value)

    def wholes(self, name: str, *, min_value: int = 1) -> tuple[int, ...]:
        """A list of whole numbers, empty if absent or null."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(f"{_short(value)} is not a list of whole numbers", name)
        return tuple(self._check(name, item, min_value, _MAX_WHOLE) for item in value)

    def section(self, name: str) -> ConfigFields | None:
        """A nested mapping, None if absent or null."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.error(f"{_short(value)} is not a mapping", name)
        return ConfigFields(value, path=self._path, prefix=f"{self._prefix}{name}.")

    def _check(self, name: str, value: object, min_value: int, max_value: int) -> int:
        # Some published configs write whole numbers as 8.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not min_value <= value <= max_value
        ):
            raise self.error(
                f"{_short(value)} is not a whole number from {min_value} to {max_value}", name
            )
        return value


def _short(value: object) -> str:
    text = (
        repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
