"""History of a gateway from a Prometheus that reads its `/metrics`: the same curves as from its own file."""

from __future__ import annotations

import asyncio
import math
from urllib.parse import urlencode

import msgspec

from atoll.runtime.http.http_client import FetchError, request
from atoll.runtime.openai import ApiError
from atoll.telemetry.history import FIGURES, HistoryTable, Kind, bucket_of

_TIMEOUT_S = 20.0
_MAX_BYTES = 64 * 2**20
_LEAST_STEP_S = 60
"""Rates need some readings of the counters in every step; Prometheus usually reads four a minute."""
_RATIOS = {
    "requests_per_s": ("atoll_model_requests_total", None),
    "input_tokens_per_s": ("atoll_model_input_tokens_total", None),
    "output_tokens_per_s": ("atoll_model_output_tokens_total", None),
    "first_token_s": ("atoll_model_first_token_seconds_total", "atoll_model_streams_total"),
    "token_s": ("atoll_model_further_seconds_total", "atoll_model_further_tokens_total"),
    "kept": ("atoll_model_kept_total", "atoll_model_judged_total"),
    "usd_per_hour": ("atoll_model_usd_total", None),
}


class _Curve(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct):
    result: list[_Curve]


class _QueryResult(msgspec.Struct):
    data: _Data


_DECODER = msgspec.json.Decoder(_QueryResult)


class PrometheusHistory:
    """Asks a Prometheus at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @classmethod
    def of(cls, setting: str | None) -> PrometheusHistory | None:
        """Return it where a setting is a URL."""
        named = setting or ""
        return cls(named) if named.startswith(("http://", "https://")) else None

    async def read(self, kind: Kind, since_s: float, until_s: float, points: int) -> HistoryTable:
        """Return the curves of all models or machines, of at most so many points each."""
        step_s = bucket_of(_LEAST_STEP_S, since_s, until_s, points)
        first = int(since_s // step_s * step_s)
        at_s = tuple(range(first, int(until_s) + 1, step_s))
        figures = FIGURES[kind]
        asked = [self._ask(write_query(kind, each, step_s), at_s, step_s) for each in figures]
        series: dict[str, dict[str, list[float | None]]] = {}
        for figure, curves in zip(figures, await asyncio.gather(*asked), strict=True):
            for curve in curves:
                name = curve.metric.get("model" if kind == "models" else "machine", "")
                own = series.setdefault(name, {f: [None] * len(at_s) for f in figures})
                for moment, text in curve.values:
                    at, value = round((moment - first) / step_s) - 1, float(text)
                    if 0 <= at < len(at_s) and math.isfinite(value):
                        own[figure][at] = value
        return HistoryTable(step_s, at_s, dict(sorted(series.items())))

    async def _ask(self, query: str, at_s: tuple[int, ...], step_s: int) -> list[_Curve]:
        # A range ends where the step does that it is of.
        begin, end = at_s[0] + step_s, at_s[-1] + step_s
        fields = {"query": query, "start": begin, "end": end, "step": step_s}
        url = f"{self._url}/api/v1/query_range?{urlencode(fields)}"
        try:
            answer = await request(url, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES)
        except FetchError as error:
            raise _unavailable(str(error)) from error
        if answer.status != 200:
            raise _unavailable(f"status {answer.status}")
        try:
            return _DECODER.decode(answer.body).data.result
        except msgspec.DecodeError as error:
            raise _unavailable("its answer cannot be read") from error


def write_query(kind: Kind, figure: str, step_s: int) -> str:
    """Return the question for one figure of all models or machines, a value for each step."""
    if kind == "machines":
        return f"avg by (machine) (avg_over_time(atoll_machine_{figure}[{step_s}s]))"
    above, below = _RATIOS[figure]
    rate = f"sum by (model) (rate({above}[{step_s}s]))"
    if below is not None:
        return f"{rate} / (sum by (model) (rate({below}[{step_s}s])) > 0)"
    return f"{rate} * 3600" if figure == "usd_per_hour" else rate


def _unavailable(why: str) -> ApiError:
    return ApiError(
        502, f"Prometheus does not answer: {why}", kind="server_error", code="prometheus_away"
    )
