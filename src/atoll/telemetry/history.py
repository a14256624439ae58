"""History of a gateway in a file of bounded size: what models were asked, and how busy machines were.

Rows are sums over steps of time, so that steps can be put together without loss. Every row is added to all
`LEVELS` when it is written: fine steps are kept for hours, coarse ones for a month. Times are Unix seconds.
The file is one of SQLite, and belongs to one thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from atoll.core.errors import InputError


class HistoryLevel(NamedTuple):
    """Steps of so many seconds, and for how many seconds they are kept."""

    step_s: int
    keep_s: int


LEVELS = (HistoryLevel(10, 3 * 3600), HistoryLevel(60, 26 * 3600), HistoryLevel(900, 31 * 86400))
"""The finest first; every step is a multiple of the one before."""
MAX_SERIES = 512
"""Models, and machines, of which rows are kept; further ones are left out until old ones are gone."""
MAX_CHANGES = 2000
MAX_POINTS = 1000
Kind = Literal["models", "machines"]
_PRUNE_S = 600.0


class ModelSums(NamedTuple):
    """What a model was asked in `seconds`, as `traffic_page.WindowSums` has it, and what it cost."""

    seconds: float
    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    firsts: float = 0.0
    first_sum_s: float = 0.0
    rest_tokens: float = 0.0
    rest_sum_s: float = 0.0
    judged: float = 0.0
    kept: float = 0.0
    usd: float = 0.0


class MachineSums(NamedTuple):
    """How busy a machine was in `seconds`: sums of what was seen, times the seconds that it was known."""

    seconds: float
    running: float = 0.0
    loads: float = 0.0
    load: float = 0.0
    caches: float = 0.0
    cache: float = 0.0
    gpus: float = 0.0
    gpu: float = 0.0
    memories: float = 0.0
    memory: float = 0.0


_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "models": ModelSums._fields,
    "machines": MachineSums._fields,
}


class HistoryChange(NamedTuple):
    """Something that explains a step in a curve: who serves is another one from then on."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class HistoryTable:
    """Curves over steps of `step_s` seconds that begin at `at_s`, by name and figure; None: not seen."""

    step_s: int
    at_s: tuple[int, ...]
    series: Mapping[str, Mapping[str, Sequence[float | None]]]


class HistoryStore:
    """See the module; `path` None keeps it in memory."""

    def __init__(self, path: Path | None) -> None:
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                ":memory:" if path is None else path, isolation_level=None, check_same_thread=False
            )
            if path is not None:
                path.chmod(0o600)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"history cannot be kept: {error}", path=path, hint="name another file, or none"
            ) from error
        self._ids: dict[tuple[Kind, str], int] = {
            (kind, name): number
            for number, kind, name in self._database.execute("SELECT id, kind, name FROM series")
        }
        self._pruned_s = 0.0

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA auto_vacuum = INCREMENTAL")
        run("PRAGMA journal_mode = WAL")
        # A crash of the machine may cost the last seconds, never the file.
        run("PRAGMA synchronous = NORMAL")
        run("CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, kind TEXT, name TEXT)")
        run("CREATE TABLE IF NOT EXISTS changes (at REAL, text TEXT)")
        for kind, columns in _COLUMNS.items():
            # Whole numbers take a byte or two where a REAL takes eight.
            sums = ", ".join(f"{name} NUMERIC NOT NULL" for name in columns)
            run(
                f"CREATE TABLE IF NOT EXISTS {kind} (step INTEGER, at INTEGER, series INTEGER, {sums}, "
                "PRIMARY KEY (step, at, series)) WITHOUT ROWID"
            )

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def add(
        self,
        at_s: float,
        models: Mapping[str, ModelSums],
        machines: Mapping[str, MachineSums],
        changes: Iterable[str] = (),
    ) -> None:
        """Add what was seen in the step that ended at a time."""
        run = self._database.execute
        run("BEGIN")
        try:
            self._add("models", at_s, models)
            self._add("machines", at_s, machines)
            for text in changes:
                run("INSERT INTO changes VALUES (?, ?)", (at_s, text[:400]))
            if not 0.0 <= at_s - self._pruned_s < _PRUNE_S:
                self._prune(at_s)
        except BaseException:
            run("ROLLBACK")
            raise
        run("COMMIT")

    def _add(
        self, kind: Kind, at_s: float, rows: Mapping[str, ModelSums] | Mapping[str, MachineSums]
    ) -> None:
        columns = _COLUMNS[kind]
        marks = ", ".join("?" * (3 + len(columns)))
        grown = ", ".join(f"{name} = {name} + excluded.{name}" for name in columns)
        numbers = [(self._id(kind, name), sums) for name, sums in rows.items()]
        self._database.executemany(
            f"INSERT INTO {kind} VALUES ({marks}) ON CONFLICT DO UPDATE SET {grown}",
            [
                (step_s, int(at_s // step_s * step_s), number, *map(_short, sums))
                for number, sums in numbers
                if number is not None
                for step_s, _ in LEVELS
            ],
        )

    def _id(self, kind: Kind, name: str) -> int | None:
        """Return the number of a series, None where there are too many."""
        known = self._ids.get((kind, name))
        if known is not None:
            return known
        if sum(own == kind for own, _ in self._ids) >= MAX_SERIES:
            return None
        found = self._database.execute(
            "INSERT INTO series (kind, name) VALUES (?, ?)", (kind, name[:256])
        )
        number = self._ids[kind, name] = int(found.lastrowid or 0)
        return number

    def _prune(self, now_s: float) -> None:
        """Forget what is too old, and series of which nothing is left."""
        run = self._database.execute
        self._pruned_s = now_s
        for kind in _COLUMNS:
            for step_s, keep_s in LEVELS:
                run(f"DELETE FROM {kind} WHERE step = ? AND at < ?", (step_s, int(now_s - keep_s)))
            run(
                f"DELETE FROM series WHERE kind = ? AND id NOT IN "
                f"(SELECT DISTINCT series FROM {kind} WHERE step = ?)",
                (kind, LEVELS[-1].step_s),
            )
        run("DELETE FROM changes WHERE at < ?", (now_s - LEVELS[-1].keep_s,))
        run(
            "DELETE FROM changes WHERE rowid NOT IN "
            "(SELECT rowid FROM changes ORDER BY at DESC LIMIT ?)",
            (MAX_CHANGES,),
        )
        self._ids = {
            (kind, name): number for number, kind, name in run("SELECT id, kind, name FROM series")
        }

    def read(self, kind: Kind, since_s: float, until_s: float, points: int) -> HistoryTable:
        """Return the curves of all models or machines, of at most so many points each.

        Of the finest steps that are kept from `since_s` on.
        """
        newest = self._database.execute(f"SELECT MAX(at) FROM {kind}").fetchone()[0] or until_s
        age_s = max(until_s, float(newest)) - since_s
        step_s = next((s for s, keep_s in LEVELS if age_s <= keep_s), LEVELS[-1].step_s)
        wide_s = bucket_of(step_s, since_s, until_s, points)
        first = int(since_s // wide_s * wide_s)
        columns = _COLUMNS[kind]
        sums = ", ".join(f"SUM({name})" for name in columns)
        rows = self._database.execute(
            f"SELECT series, at / {wide_s} * {wide_s} AS bucket, {sums} FROM {kind} "
            "WHERE step = ? AND at >= ? AND at < ? GROUP BY bucket, series",
            (step_s, first, int(until_s) + 1),
        )
        at_s = tuple(range(first, int(until_s) + 1, wide_s))
        names = {number: name for (own, name), number in self._ids.items() if own == kind}
        found: dict[str, dict[str, list[float | None]]] = {}
        figures = _MODEL_FIGURES if kind == "models" else _MACHINE_FIGURES
        for series, bucket, *values in rows:
            name = names.get(series)
            if name is None:
                continue
            curves = found.get(name)
            if curves is None:
                curves = found[name] = {figure: [None] * len(at_s) for figure in figures}
            at = (bucket - first) // wide_s
            for figure, (above, below, factor) in figures.items():
                if values[below]:
                    curves[figure][at] = _short(values[above] / values[below] * factor)
        return HistoryTable(wide_s, at_s, dict(sorted(found.items())))

    def changes(self, since_s: float, until_s: float) -> list[HistoryChange]:
        """Return what changed in a time, the oldest first."""
        rows = self._database.execute(
            "SELECT at, text FROM changes WHERE at >= ? AND at < ? ORDER BY at LIMIT ?",
            (since_s, until_s, MAX_CHANGES),
        )
        return [HistoryChange(at_s, text) for at_s, text in rows]


def bucket_of(step_s: int, since_s: float, until_s: float, points: int) -> int:
    """Return the width in seconds of at most so many buckets of whole steps."""
    steps = max(1, round((until_s - since_s) / step_s))
    return step_s * -(-steps // max(1, points))


def _figures(
    columns: tuple[str, ...], ratios: Mapping[str, tuple[str, str, float]]
) -> dict[str, tuple[int, int, float]]:
    """Return figures as the places of a sum and of what it is divided by, and a factor."""
    return {
        name: (columns.index(above), columns.index(below), factor)
        for name, (above, below, factor) in ratios.items()
    }


_MODEL_FIGURES = _figures(
    ModelSums._fields,
    {
        "requests_per_s": ("requests", "seconds", 1.0),
        "input_tokens_per_s": ("input_tokens", "seconds", 1.0),
        "output_tokens_per_s": ("output_tokens", "seconds", 1.0),
        "first_token_s": ("first_sum_s", "firsts", 1.0),
        "token_s": ("rest_sum_s", "rest_tokens", 1.0),
        "kept": ("kept", "judged", 1.0),
        "usd_per_hour": ("usd", "seconds", 3600.0),
    },
)
_MACHINE_FIGURES = _figures(
    MachineSums._fields,
    {
        "running": ("running", "seconds", 1.0),
        "load": ("load", "loads", 1.0),
        "kv_share": ("cache", "caches", 1.0),
        "gpu_share": ("gpu", "gpus", 1.0),
        "memory_share": ("memory", "memories", 1.0),
    },
)
FIGURES: dict[Kind, tuple[str, ...]] = {
    "models": tuple(_MODEL_FIGURES),
    "machines": tuple(_MACHINE_FIGURES),
}
"""Names of the curves of a model, and of a machine."""


def _short(value: float) -> float:
    """Return a number with five digits that matter, whole where it is: it takes less room."""
    short = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
    return int(short) if short == int(short) else short
