"""Traces that a plan can be tried with: built-in workloads, and files that somebody uploaded.

An upload is read once, by the readers of `atoll.workload`, and written again as arrivals and lengths; what
was sent is deleted, whatever text was in it. Uploads are in a folder that only its user can open, and
go after a day, when there are too many, and when the planner ends.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from atoll.core.errors import InputError, UnknownNameError
from atoll.planner.worker import Report, Said
from atoll.workload.builtin import NAMES, get_builtin
from atoll.workload.lengths import BUILT_IN
from atoll.workload.requests import Requests
from atoll.workload.stats import Summary
from atoll.workload.traces import read_trace
from atoll.workload.writing import write_trace

MAX_BYTES = 64 * 2**20
_MAX_TRACES = 20
_MAX_TOTAL_BYTES = 512 * 2**20
_KEPT_S = 86_400.0
_MAX_POINTS = 200
_MAX_MODELS = 100
_LONGEST_NAME = 100
# How files of gzip, zip, bzip2, xz, zstd and Parquet begin.
_PACKED = (b"\x1f\x8b", b"PK", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PAR1")


class UploadedStats(TypedDict):
    """What is known of a trace: requests, and tokens of prompts and answers; null where it has no end."""

    requests: int | None
    seconds: float | None
    requests_per_s: float | None
    input_mean: float | None
    output_mean: float | None
    models: list[str]
    timeline: NotRequired[list[list[float]]]
    """Seconds and requests per second."""
    text: NotRequired[str]
    bad_rows: NotRequired[int]
    left_out: NotRequired[int]
    problems: NotRequired[list[str]]


class ShownTrace(UploadedStats):
    """A trace as it is listed."""

    id: str
    name: str
    kind: Literal["builtin", "uploaded"]


@dataclass(frozen=True, slots=True)
class UploadedTrace:
    """A trace that was uploaded: its name is only shown, `path` has arrivals and lengths."""

    id: str
    name: str
    path: Path
    bytes: int
    uploaded_s: float
    stats: UploadedStats

    def describe(self) -> ShownTrace:
        """Return it as it is listed."""
        return ShownTrace(id=self.id, name=self.name, kind="uploaded", **self.stats)


class TraceStore:
    """The traces of a planner; `clock` is Unix time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._traces: dict[str, UploadedTrace] = {}

    def describe(self) -> list[ShownTrace]:
        """Return all traces as they are listed: built-in ones, then uploads, the newest first."""
        self._forget_old()
        uploads = [trace.describe() for trace in reversed(self._traces.values())]
        return [describe_builtin(name) for name in NAMES] + uploads

    def receive(self, body: bytes) -> tuple[str, Path]:
        """Write down what was sent, for a worker to read; returns the id of the trace and the path."""
        check_upload(body)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"u-{secrets.token_hex(6)}"
        path = self._folder / f"{name}.sent"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(body)
        return name, path

    def target(self, name: str) -> Path:
        """Return where the lengths of a trace are kept."""
        return self._folder / f"{name}.csv"

    def add(self, name: str, shown: str, stats: UploadedStats) -> UploadedTrace:
        """Keep a trace whose lengths are at its target; the oldest go where there are too many."""
        path = self.target(name)
        trace = UploadedTrace(name, shown, path, path.stat().st_size, self._clock(), stats)
        self._traces[name] = trace
        self._forget_old()
        return trace

    def find(self, name: str) -> UploadedTrace:
        """Return the upload of this id."""
        self._forget_old()
        if name not in self._traces:
            raise UnknownNameError("trace", name, (*NAMES, *self._traces), field="trace")
        return self._traces[name]

    def remove(self, name: str) -> None:
        """Delete an upload."""
        if name in NAMES:
            raise InputError(f"{name} is built in", field="trace", hint="delete uploads only")
        self.find(name).path.unlink(missing_ok=True)
        del self._traces[name]

    def _forget_old(self) -> None:
        now_s = self._clock()
        total = sum(trace.bytes for trace in self._traces.values())
        # The oldest first: a dict keeps the order in which they came.
        for name, trace in list(self._traces.items()):
            many = len(self._traces) > _MAX_TRACES or total > _MAX_TOTAL_BYTES
            if many or now_s - trace.uploaded_s > _KEPT_S:
                trace.path.unlink(missing_ok=True)
                total -= trace.bytes
                del self._traces[name]


def check_upload(body: bytes) -> None:
    """Refuse what cannot be a trace before anything reads it."""
    if not body:
        raise InputError("the trace is empty", hint="send its file as the body")
    if len(body) > MAX_BYTES:
        raise InputError("more than 64 MiB", hint="send a part of it")
    if body.startswith(_PACKED):
        raise InputError("the trace is packed", hint="unpack it first")
    # The beginning is enough to tell text from what is none.
    if b"\x00" in body[:65_536]:
        raise InputError("the trace is no text", hint="send CSV or JSON lines")


def clean_name(text: str) -> str:
    """Return the name of a file as it may be shown: no folders, no control characters, not too long."""
    last = text.replace("\\", "/").rpartition("/")[2]
    shown = "".join(letter for letter in last if letter.isprintable()).strip()
    return shown[:_LONGEST_NAME] or "trace"


def describe_builtin(name: str) -> ShownTrace:
    """Return a built-in workload as it is listed: it has no end."""
    workload = get_builtin(name)
    mix = BUILT_IN.get(name)
    return ShownTrace(
        id=name,
        name=name,
        kind="builtin",
        requests=None,
        seconds=None,
        requests_per_s=workload.rate_per_s,
        input_mean=None if mix is None else mix.input_mean,
        output_mean=None if mix is None else mix.output_mean,
        models=[],
        text=workload.about,
    )


def read_upload(arguments: Said, report: Report) -> Said:
    """Read what was uploaded at `path` and write its lengths to `target` (`worker.Job`)."""
    path, target = Path(arguments["path"]), Path(arguments["target"])
    try:
        return {"stats": rewrite(path, target, report)}
    except InputError as error:
        # Where it lies is nobody's business.
        raise InputError(
            error.message, line=error.line, field=error.field, hint=error.hint
        ) from error
    finally:
        path.unlink(missing_ok=True)


def rewrite(path: Path, target: Path, report: Report) -> UploadedStats:
    """Write the arrivals and lengths of a trace to another file; return its statistics."""
    trace, summary = read_trace(path), Summary()

    def counted() -> Iterator[Requests]:
        for chunk in trace.chunks():
            if len(chunk.models) > _MAX_MODELS or len(chunk.classes) > _MAX_MODELS:
                raise InputError(
                    f"more than {_MAX_MODELS} models or classes",
                    hint="check that its columns are what they are called",
                )
            summary.add(chunk)
            report({"text": f"{summary.requests:,} requests read", "share": None})
            yield chunk

    try:
        write_trace(target, counted())
        target.chmod(0o600)
    except BaseException:
        # Half a file is no trace, whatever ended the writing.
        target.unlink(missing_ok=True)
        raise
    found = trace.report
    stats = describe_summary(summary)
    stats["bad_rows"] = found.bad
    stats["left_out"] = sum(found.left_out.values())
    # Without what stands in the rows, which may be anything.
    stats["problems"] = [f"{why}: {count:,} rows" for why, count in found.reasons.items()][:5]
    return stats


def describe_summary(summary: Summary) -> UploadedStats:
    """Return what is told of a trace: how much of what, and requests per second over time."""
    stats = summary.stats()
    return UploadedStats(
        requests=stats.requests,
        seconds=summary.span_s,
        requests_per_s=stats.requests / summary.span_s if summary.span_s > 0.0 else None,
        input_mean=stats.input.mean,
        output_mean=stats.output.mean,
        models=sorted(name for name in stats.models if name),
        timeline=_timeline(summary),
    )


def _timeline(summary: Summary) -> list[list[float]]:
    if summary.span_s <= 0.0:
        return []
    # Rounded up, so that there are no more than `_MAX_POINTS`.
    steps = max(1, -(-int(summary.span_s / summary.width_s) // _MAX_POINTS))
    width_s = steps * summary.width_s
    counts = summary.counts(width_s)
    return [[at * width_s, count / width_s] for at, count in enumerate(counts.tolist())]
