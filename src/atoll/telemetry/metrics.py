"""Counters, gauges and histograms in Prometheus' text format, with a bound on label values.

Made for one thread and for hot paths: a child is looked up once and then costs an addition. Labels that
come from outside (a model's name in a request, say) go through `limit`ed families: past the limit every
new combination is counted under "other", so that no client can fill the memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for times of requests, in seconds."""


class Count:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count something."""
        self.value += amount

    def lines(self, name: str, labels: str) -> list[str]:
        """Return the lines of the exposition."""
        return [f"{name}{_braced(labels)} {_number(self.value)}"]


class Histogram:
    """How often a value fell below each of some bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        """Return the lines of the exposition."""
        found: list[str] = []
        seen = 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            inner = f'{labels},le="{bound}"' if labels else f'le="{bound}"'
            found.append(f"{name}_bucket{{{inner}}} {seen}")
        found.append(f"{name}_sum{_braced(labels)} {_number(self.total)}")
        found.append(f"{name}_count{_braced(labels)} {seen}")
        return found


_Child = TypeVar("_Child", Count, Histogram)


class Family(Generic[_Child]):
    """A metric with labels: one child for each combination of their values."""

    def __init__(
        self,
        name: str,
        help_text: str,
        make: Callable[[], _Child],
        labels: Sequence[str] = (),
        *,
        limit: int = 1000,
    ) -> None:
        self.name = name
        self._help = help_text
        self._make: Callable[[], _Child] = make
        self._labels = tuple(labels)
        self._limit = limit
        self._children: dict[tuple[str, ...], _Child] = {}
        if not labels:
            self.child()

    def child(self, *values: str) -> _Child:
        """Return the child for these label values, or the one for "other" past the limit."""
        found = self._children.get(values)
        if found is not None:
            return found
        if len(self._children) >= self._limit:
            values = ("other",) * len(self._labels)
        return self._children.setdefault(values, self._make())

    def lines(self) -> list[str]:
        """Return the lines of the exposition."""
        # The type is that of what is made, whatever it is called.
        kind = "histogram" if isinstance(self._make(), Histogram) else "counter"
        found = [f"# HELP {self.name} {self._help}", f"# TYPE {self.name} {kind}"]
        for values, child in self._children.items():
            found += child.lines(self.name, _pairs(self._labels, values))
        return found


class Gauge:
    """A metric read when it is asked for: label values and the number of each."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        self.name = name
        self._help = help_text
        self._labels = tuple(labels)
        self._read = read

    def lines(self) -> list[str]:
        """Return the lines of the exposition."""
        found = [f"# HELP {self.name} {self._help}", f"# TYPE {self.name} {self.kind}"]
        found += [
            f"{self.name}{_braced(_pairs(self._labels, values))} {_number(number)}"
            for values, number in self._read()
        ]
        return found


class Total(Gauge):
    """A number that grows and is kept elsewhere, read when it is asked for."""

    kind = "counter"


def exposition(families: Iterable[Family[Count] | Family[Histogram] | Gauge]) -> bytes:
    """Return the page that Prometheus reads."""
    return "".join(f"{line}\n" for family in families for line in family.lines()).encode()


def _pairs(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(f'{n}="{_escaped(v)}"' for n, v in zip(names, values, strict=True))


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
