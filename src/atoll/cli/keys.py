"""`atoll keys`: make, list and revoke the API keys of a gateway."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.console_client import CONSOLE_HELP, CONSOLE_VARIABLE, console_field
from atoll.cli.key_store import find_keys
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.cli.shared_options import AsJson
from atoll.core.options import option
from atoll.core.quantities import Count
from atoll.report.terminal import console, emit, note, table

if TYPE_CHECKING:
    from atoll.runtime.accounts.api_keys import ApiKey

_LATEST_S = 253_370_764_800.0
"""The year 9999: later dates cannot be shown."""
app = typer.Typer(add_completion=False, no_args_is_help=True)

_FORMS = "sqlite:///FILE, postgresql://..., or a file; else $ATOLL_DB"
DB_HELP = f"{_FORMS}, else the user's own."
STORE_HELP = f"{_FORMS}, else the keys of the console that runs here, else the user's own."
Db = Annotated[
    str | None, typer.Option("--db", envvar="ATOLL_DB", show_envvar=False, help=STORE_HELP)
]
Console = Annotated[
    str | None,
    typer.Option("--console", envvar=CONSOLE_VARIABLE, metavar="URL", help=CONSOLE_HELP),
]
Which = Annotated[str, typer.Argument(metavar="ID", help="Id of a key, or its name.")]


@app.callback()
def root() -> None:
    """Make, list and revoke the API keys of a gateway."""


class KeySettings(VerbSettings):
    """Options of `atoll keys create`; `NewKey` checks what a key may be."""

    name: str = option(..., "What the key is for.", argument=True)
    owner: str = option("", "Whose it is.")
    role: str = option(
        "member",
        "admin (changes all), operator (runs fleets), member, or viewer (looks only).",
    )
    models: tuple[str, ...] = option(
        (), "A model it may use, or a pattern (llama-*); repeatable.", "--model"
    )
    requests_per_min: Count | None = option(None, "Of all gateways, as are tokens.")
    tokens_per_min: Count | None = option(None, "Prompt and answer; 10k, 1M.")
    tokens_per_day: Count | None = option(None, "Of all gateways; UTC.")
    tokens_per_month: Count | None = option(None, "")
    tokens_total: Count | None = option(None, "")
    audio_seconds_per_day: Count | None = option(
        None, "Of sound heard and speech made, all gateways; UTC."
    )
    audio_seconds_per_month: Count | None = option(None, "")
    audio_seconds_total: Count | None = option(None, "")
    pixels_per_day: Count | None = option(None, "Seen or drawn; 100M.")
    pixels_per_month: Count | None = option(None, "")
    pixels_total: Count | None = option(None, "")
    concurrent: int | None = option(None, "Requests at the same time, of all gateways.")
    strict: bool = option(
        False, "Nothing goes over a limit; requests must say max_tokens.", "--strict"
    )
    expires: str | None = option(None, "After 30d, or on 2027-01-31 (UTC).")
    providers: tuple[str, ...] = option(
        (), "A provider it trusts; repeatable. Default: all.", "--provider"
    )
    regions: tuple[str, ...] = option((), "Repeatable.", "--region")
    gpus: tuple[str, ...] = option((), "A GPU class; repeatable.", "--gpu")
    min_precision: str | None = option(None, "bf16, fp8, int4.")
    stability: str | None = option(None, "At least spot, batch, standard, reserved.")
    track: bool = option(True, "Whether its requests are written down.", "--track/--no-track")
    db: str | None = option(None, STORE_HELP, env="ATOLL_DB")
    console: str | None = console_field()
    as_json: bool = json_field()


@verb(app, KeySettings)
def create(options: KeySettings) -> None:
    """Make a key and print it, once: only a hash of it is kept."""
    from atoll.runtime.accounts.api_keys import NewKey
    from atoll.runtime.pool.policy import Policy

    values = options.model_dump(exclude_none=True)
    demands = {name: values[name] for name in Policy.model_fields if values.get(name)}
    spec = {name: values[name] for name in NewKey.model_fields if name in values}
    if demands:
        spec["policy"] = Policy.parse(demands)
    if options.expires is not None:
        spec["expires_s"] = _future(options.expires)
    new_key = NewKey.parse(spec)
    text, key = find_keys(options.db, options.console).make(new_key)
    if options.as_json:
        emit({"key": text} | key.describe(time.time()), True)
        return
    console().print(text)
    note(f"key {key.id} ({options.name}): shown this once; keep it safe")


@app.command("list")
def list_(
    every: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False,
    db: Db = None,
    console_url: Console = None,
    as_json: AsJson = False,
) -> None:
    """List the keys; their secrets are not known."""
    now_s = time.time()
    keys = [
        key
        for key in find_keys(db, console_url).list_all()
        if every or key.state(now_s) != "revoked"
    ]
    columns = (
        "id",
        "name",
        "owner",
        "role",
        "state",
        "models",
        "nodes",
        "limits",
        "made",
        "expires",
    )
    rows = [
        (
            key.id,
            key.spec.name,
            key.spec.owner or None,
            key.spec.role,
            key.state(now_s),
            ", ".join(key.spec.models) or "all",
            _demands(key) or "any",
            _limits(key) or None,
            _day(key.created_s),
            None if key.spec.expires_s is None else _day(key.spec.expires_s),
        )
        for key in keys
    ]
    emit([key.describe(time.time()) for key in keys], as_json, lambda: table(columns, rows))


@app.command()
def show(which: Which, db: Db = None, console_url: Console = None, as_json: AsJson = False) -> None:
    """Show a key and what it has used so far."""
    key, used = find_keys(db, console_url).find(which)
    shown = key.describe(time.time()) | {
        "tokens_used": {name: u.tokens for name, u in used.items()}
    }
    if any(u.audio_ms for u in used.values()):
        shown["audio_seconds_used"] = {name: u.audio_ms / 1000 for name, u in used.items()}
    if any(u.pixels for u in used.values()):
        shown["pixels_used"] = {name: u.pixels for name, u in used.items()}
    if not as_json:
        times = {name: shown.pop(name) for name in ("created_s", "expires_s", "revoked_s")}
        shown["policy"] = _demands(key) or None
        shown |= {
            name.removesuffix("_s"): None if at_s is None else _day(at_s)
            for name, at_s in times.items()
        }
    emit(shown, as_json)


@app.command()
def revoke(
    which: Which, db: Db = None, console_url: Console = None, as_json: AsJson = False
) -> None:
    """Make a key useless for good; gateways know within two seconds."""
    key = find_keys(db, console_url).revoke(which)
    if as_json:
        emit(key.describe(time.time()), True)
    else:
        note(f"key {key.id} ({key.spec.name}) is revoked")


def _future(text: str) -> float:
    """Read when a key expires; a moment that is over would make a key that never works."""
    from atoll.core.errors import InputError

    expires_s = parse_moment(text, "--expires", ahead=True)
    if expires_s <= time.time():
        hint = "give a span (30d), or a date to come (UTC, from its midnight on)"
        raise InputError(f"{text} is over already", field="--expires", hint=hint)
    if expires_s > _LATEST_S:
        hint = "leave it out for a key that does not expire"
        raise InputError(f"{text} is too far ahead", field="--expires", hint=hint)
    return expires_s


def parse_moment(text: str, field: str, *, ahead: bool) -> float:
    """Read a moment: a date or time (UTC unless it says otherwise), or a span from now: 30d, 12h."""
    from atoll.core.errors import InputError
    from atoll.core.units import parse_duration

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            span_s = parse_duration(text)
        except InputError:
            hint = "write it like 2026-11-30 or 30d"
            raise InputError(f"{text!r} is no date or span", field=field, hint=hint) from None
        return time.time() + (span_s if ahead else -span_s)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _limits(key: ApiKey) -> str:
    from atoll.core.units import format_count

    spec = key.spec
    limits = (
        (spec.requests_per_min, "requests/min"),
        (spec.tokens_per_min, "tokens/min"),
        (spec.tokens_per_day, "tokens/day"),
        (spec.tokens_per_month, "tokens/month"),
        (spec.tokens_total, "tokens"),
        (spec.audio_seconds_per_day, "s of sound/day"),
        (spec.audio_seconds_per_month, "s of sound/month"),
        (spec.audio_seconds_total, "s of sound"),
        (spec.pixels_per_day, "pixels/day"),
        (spec.pixels_per_month, "pixels/month"),
        (spec.pixels_total, "pixels"),
        (spec.concurrent, "at once"),
    )
    shown = [f"{format_count(most)} {what}" for most, what in limits if most is not None]
    return ", ".join([*shown, "strict"] if spec.strict else shown)


def _demands(key: ApiKey) -> str:
    """Say what a key demands of nodes."""
    policy = key.spec.policy
    if policy is None:
        return ""
    demanded = policy.model_dump(mode="json", exclude_none=True).items()
    return "; ".join(
        f"{name.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in demanded
    )


def _day(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d}"
