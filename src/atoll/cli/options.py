"""The options of a verb, written down once: as the fields of a model.

A verb's model says of each option its name, type, bounds, default, help (`description`) and, in
`json_schema_extra`, what only a command line needs:

    flag      its name there, where it is not the field's: "--label" for `labels`, "--open" for `is_open`;
              a list where it has several, of which messages use the longest
    argument  True: not an option but an argument
    panel     the heading under which `--help` shows it
    metavar   what stands for its value in `--help`
    env       the environment variable that it is read from
    file      True: names a YAML file with further options

From these `verb` makes the command, so that `--help` and what is checked cannot differ. What is given on
the command line wins over the environment, that over the file, and that over the default.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.core.errors import AtollError, InputError
from atoll.core.files import load_yaml
from atoll.core.frozen import Frozen
from atoll.core.options import option

_PLAIN = (bool, int, float, Path)
_QUOTED_NAME = re.compile(r"`(\w+)`")


class VerbSettings(Frozen, BaseSettings):
    """Options of a verb. An environment variable counts only where a field names it."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return where options come from, the strongest first."""
        return init_settings, _Environment(settings_cls), _OptionsFile(settings_cls)

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """Return the options, of which these were given; an error says which one, and where it stood."""
        try:
            return cls.parse(dict(values))
        except InputError as error:
            raise cls._locate(error, values) from error

    @classmethod
    def _locate(cls, error: InputError, values: Mapping[str, object]) -> InputError:
        name = (error.field or "").partition(".")[0]
        info = cls.model_fields.get(name)
        if info is not None and name in values:
            return InputError(error.message, field=flag(name, info), hint=error.hint)
        if info is not None and _from_environment(info) is not None:
            return InputError(error.message, field=f"${_extra(info, 'env')}", hint=error.hint)
        return error.locate(path=_options_file(cls, values) if name else None)


def argument(description: str, default: Any = ..., **extra: Any) -> Any:
    """Return the field of an argument."""
    return option(default, description, argument=True, **extra)


def overlay_field() -> Any:
    """Return the field of --overlay, a tuple of paths."""
    return option((), "A YAML file that adds or changes facts; may be repeated.")


def no_cache_field() -> Any:
    """Return the field of --no-cache."""
    return option(False, "Compute all templates anew and keep none.")


def json_field(description: str = "Print JSON, in base units.") -> Any:
    """Return the field of --json, which verbs call `as_json`."""
    return option(False, description, "--json")


class _Environment(PydanticBaseSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return what the environment says of an option."""
        return _from_environment(field), field_name, False

    def __call__(self) -> dict[str, Any]:
        read = {
            name: _from_environment(info) for name, info in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in read.items() if value is not None}


class _OptionsFile(PydanticBaseSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Return what the file says of an option."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        path = _options_file(self.settings_cls, self.current_state)
        if path is None:
            return {}
        data = load_yaml(path)
        if not isinstance(data, dict):
            raise InputError("a mapping of options is needed", path=path)
        # In a file options may be written as on the command line.
        options = {str(key).replace("-", "_"): value for key, value in data.items()}
        # What wins takes the place of all that the file says, of a mapping too.
        return {key: value for key, value in options.items() if key not in self.current_state}


S = TypeVar("S", bound=VerbSettings)


def verb(
    app: typer.Typer, model: type[S], name: str | None = None, **command: Any
) -> Callable[[Callable[[S], None]], Callable[[S], None]]:
    """Make a command of a function that takes a verb's options; `command` goes to typer as it is."""

    def register(function: Callable[[S], None]) -> Callable[[S], None]:
        def run(ctx: typer.Context, **values: Any) -> None:
            set_values = {
                name: _read(values[name], name, info)
                for name, info in model.model_fields.items()
                if name in values and _is_given(ctx, name)
            }
            settings = model.read(set_values)
            try:
                function(settings)
            except AtollError as error:
                name_flags(error, model)
                raise

        parameters = [
            _parameter(name, info)
            for name, info in model.model_fields.items()
            if info.description is not None
        ]
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        run.__annotations__ = {p.name: p.annotation for p in (context, *parameters)}
        run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        app.command(name, **command)(run)
        return function

    return register


def name_flags(error: AtollError, model: type[VerbSettings]) -> None:
    """Have an error name a verb's options as its command line does: `stand_in` becomes --stand-in.

    Functions below name the fields of their options, as whoever calls them from Python knows them.
    """
    fields = model.model_fields
    if error.field in fields:
        error.field = flag(error.field, fields[error.field])
    if error.hint is not None:
        error.hint = _QUOTED_NAME.sub(
            lambda found: flag(found[1], fields[found[1]]) if found[1] in fields else found[0],
            error.hint,
        )


def flag(name: str, info: FieldInfo) -> str:
    """Return what an option is called on the command line."""
    if _extra(info, "argument"):
        return name.upper()
    return max(_flags(name, info), key=len).partition("/")[0]


def _flags(name: str, info: FieldInfo) -> list[str]:
    named = _extra(info, "flag") or "--" + name.replace("_", "-")
    return list(named) if isinstance(named, list) else [str(named)]


def _extra(info: FieldInfo, key: str) -> Any:
    extra = info.json_schema_extra
    return extra.get(key) if isinstance(extra, dict) else None


def _from_environment(info: FieldInfo) -> str | None:
    variable = _extra(info, "env")
    return (os.environ.get(str(variable)) or None) if variable else None


def _options_file(model: type[BaseSettings], values: Mapping[str, object]) -> Path | None:
    for name, info in model.model_fields.items():
        if _extra(info, "file") and values.get(name) is not None:
            return Path(str(values[name]))
    return None


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _read(value: Any, name: str, info: FieldInfo) -> Any:
    if _origin(info) is not dict:
        return tuple(value) if isinstance(value, list) else value
    pairs = {}
    form = str(_extra(info, "metavar") or "KEY=VALUE")
    for text in value:
        key, sign, content = text.partition("=")
        if not sign or not key or not content:
            raise InputError(f"cannot read {text!r}", field=flag(name, info), hint=f"write {form}")
        pairs[key] = content
    return pairs


def _origin(info: FieldInfo) -> Any:
    """Return the class of an option's values, without what else is said of them."""
    return _plain(info.annotation)[0]


def _plain(annotation: Any) -> tuple[Any, bool]:
    """Return the class behind an annotation, and whether its text is read before it is checked."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *rest = get_args(annotation)
        kind, is_text = _plain(inner)
        return kind, is_text or any(isinstance(part, BeforeValidator) for part in rest)
    if origin in (Union, types.UnionType):
        return _plain(next(part for part in get_args(annotation) if part is not type(None)))
    return origin or annotation, False


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    kind, is_text = _plain(info.annotation)
    is_text = is_text or any(isinstance(part, BeforeValidator) for part in info.metadata)
    many = kind in (tuple, dict)
    shown: Any = list[str] if many else str if is_text or kind not in _PLAIN else kind
    settings = {"help": info.description or None, "metavar": _extra(info, "metavar")}
    if _extra(info, "argument"):
        declared: Any = typer.Argument(**settings, show_default=False)
    else:
        env = _extra(info, "env")
        declared = typer.Option(
            *_flags(name, info),
            **settings,
            envvar=env,
            show_envvar=f"${env}" not in (info.description or ""),
            rich_help_panel=_extra(info, "panel"),
            show_default=_has_plain_default(info),
        )
    default: Any = inspect.Parameter.empty
    if not info.is_required():
        default = None if many or not _has_plain_default(info) else info.default
        shown = shown if default is not None else shown | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[shown, declared]
    )


def _has_plain_default(info: FieldInfo) -> bool:
    """Return whether a default is worth showing: quantities have theirs as text, or not at all."""
    return isinstance(info.default, bool | int | float | str) and info.default != ""
