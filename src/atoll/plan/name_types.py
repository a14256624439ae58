"""Field types for the names a problem and a plan hold, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from atoll.core.errors import InputError
from atoll.core.ids import parse_node_type, parse_role, slug


def refuse(error: InputError) -> PydanticCustomError:
    """Return the error as pydantic raises it, so that it adds the field's place."""
    return PydanticCustomError(
        "quantity", "{message}", {"message": error.message, "hint": error.hint}
    )


def _check(check: Callable[[str], object]) -> AfterValidator:
    def read(text: str) -> str:
        try:
            check(text)
        except InputError as error:
            raise refuse(error) from error
        return text

    return AfterValidator(read)


def _canonical_node_type(text: str) -> None:
    written = str(parse_node_type(text))
    if written != text:
        raise InputError(f"{text!r} is not written as GPU:COUNT", hint=f"write {written}")


def _canonical_role(text: str) -> None:
    written = str(parse_role(text))
    if written != text:
        raise InputError(f"{text!r} has spaces around it", hint=f"write {written}")


Name = Annotated[str, _check(slug)]
"""A service, region or instance: letters, digits, `.`, `_`, `-`, and `/` between parts."""
NodeTypeName = Annotated[str, _check(_canonical_node_type)]
"""A canonical node type id, "L40S:2"."""
RoleName = Annotated[str, _check(_canonical_role)]
"""A role, "qwen3-32b/llm/decode"."""
ModelName = Annotated[str, Field(min_length=1, max_length=300)]
"""A catalog model, with its precision variant if any: "llama-3-70b@fp8"."""
