"""What answers of tasks hold beside their endpoint's shape: checked when a task is loaded, and written out.

An endpoint takes the fields it knows of an answer. All others are sent as they are, in an extension field
(`atoll`), as far as JSON can say them: numbers, texts, lists, dictionaries, and arrays as lists of numbers.
What cannot be sent is an error before anybody asks.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from atoll.core.errors import InputError
from atoll.runtime.graph_server.graph_config import ENDPOINT_PATHS, Endpoint
from atoll.runtime.openai import ApiError
from atoll.tasks.flow import task_types
from atoll.tasks.values import Handle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_NUMBERS = 2**20
"""Of all arrays of one answer: some ten megabytes of JSON."""
_PLAIN = (bool, int, float, str, type(None), Handle)


class _Known(NamedTuple):
    """Fields of an answer that an endpoint needs, and those that it knows besides."""

    needed: tuple[str, ...]
    others: tuple[str, ...] = ()
    extends: bool = True
    """Whether its answers have room for more."""


_KNOWN: dict[Endpoint, _Known] = {
    "chat": _Known(("text",), ("audio",)),
    "transcriptions": _Known(("text", "segments"), ("seconds", "texts")),
    "speech": _Known(("audio",), extends=False),
    "images": _Known(("images",)),
    "embeddings": _Known(("vectors", "tokens")),
}
_PATHS = {endpoint: path for path, endpoint in ENDPOINT_PATHS.items()}


def check_answer(endpoint: Endpoint, task: type[Any]) -> None:
    """Refuse (InputError) a task whose answers an endpoint could not send whole.

    A task that does not say what it answers is taken; what it answers is checked when it does.
    """
    given = task_types(task)[1]
    if given is Any:
        return
    known, where = _KNOWN[endpoint], f"tasks.{endpoint}"
    if not (isinstance(given, type) and is_dataclass(given)):
        raise InputError(
            f"{task.__name__} answers with {getattr(given, '__name__', given)}",
            field=where,
            hint=f"answer with a dataclass that has {', '.join(known.needed)}",
        )
    try:
        hints = get_type_hints(given)
    except NameError as error:
        hint = "let its module define the types of its fields"
        raise InputError(f"{given.__name__}: {error}", field=where, hint=hint) from error
    names = [each.name for each in fields(given)]
    for name in known.needed:
        if name not in names:
            raise InputError(
                f"{task.__name__} answers without {name}",
                field=where,
                hint=f"{_PATHS[endpoint]} sends it: add it to {given.__name__}",
            )
    for name in names:
        if name in known.needed or name in known.others:
            continue
        if not known.extends:
            raise InputError(
                f"{_PATHS[endpoint]} sends sound alone, and not {name} of {task.__name__}",
                field=f"{where}.{name}",
                hint=f"leave it out of {given.__name__}",
            )
        if not _can_be_sent(hints[name]):
            shown = getattr(hints[name], "__name__", str(hints[name]))
            raise InputError(
                f"{task.__name__} answers with {name}, of type {shown}, which cannot be sent",
                field=f"{where}.{name}",
                hint="numbers, texts, lists, dictionaries and handles of arrays can",
            )


def _can_be_sent(kind: Any, above: tuple[Any, ...] = ()) -> bool:
    if kind is Any or kind in _PLAIN or kind in (list, dict, tuple) or kind in above:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (list, tuple, Union, types.UnionType):
        return all(part is ... or _can_be_sent(part, above) for part in inner)
    if origin is dict:
        return inner[0] is str and _can_be_sent(inner[1], above)
    if isinstance(kind, type) and is_dataclass(kind):
        return all(_can_be_sent(part, (*above, kind)) for part in get_type_hints(kind).values())
    return False


@dataclass(slots=True)
class AnswerExtras:
    """Writes what an answer holds beside the shape of its endpoint."""

    endpoint: Endpoint
    array: Callable[[Handle], Awaitable[NDArray[Any]]]
    """Fetches the array of a handle."""
    left: int = _MAX_NUMBERS

    async def write(self, answer: Any) -> dict[str, Any]:
        """Return the fields that the endpoint does not know, as JSON says them, without empty ones."""
        known = _KNOWN[self.endpoint]
        if not is_dataclass(answer):
            return {}
        names = [each.name for each in fields(answer)]
        extra = [name for name in names if name not in known.needed and name not in known.others]
        written = {name: await self._plain(getattr(answer, name), name) for name in extra}
        return {name: value for name, value in written.items() if value not in (None, "", [], {})}

    async def _plain(self, value: Any, name: str) -> Any:
        if isinstance(value, Handle):
            array = await self.array(value)
            self.left -= array.size
            if self.left < 0:
                raise self._refuse(name, f"arrays of more than {_MAX_NUMBERS} numbers")
            return array.tolist()
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list | tuple):
            return [await self._plain(part, name) for part in value]
        if isinstance(value, Mapping):
            return {str(key): await self._plain(part, name) for key, part in value.items()}
        if is_dataclass(value):
            each = {part.name: getattr(value, part.name) for part in fields(value)}
            return {key: await self._plain(part, name) for key, part in each.items()}
        raise self._refuse(name, type(value).__name__)

    def _refuse(self, name: str, what: str) -> ApiError:
        message = f"tasks.{self.endpoint}.{name}: {what} cannot be sent"
        return ApiError(500, message, kind="server_error")
