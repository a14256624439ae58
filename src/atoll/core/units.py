"""Reading and writing quantities: "1600ms", "24GB", "10Gbit/s", "$1.86/h".

Inside Atoll every quantity is a plain float in its base unit: seconds, bytes, bytes/s, 1/s,
USD/hour. Text always carries its unit; a bare number inside a string is refused, because the
reader cannot tell 1600 ms from 1600 s. A Python number is taken to be in the base unit already.

Durations, rates, sizes and bandwidths are written so that they can be read again; money, shares and
throughputs are rounded for people. Tables, pages and sentences take all their figures from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import InputError

_NUMBER = r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_QUANTITY = re.compile(rf"{_NUMBER}\s*(?P<unit>\D.*)?", re.ASCII)
_PRICE = re.compile(rf"(?P<sign>\$)?\s*{_NUMBER}\s*(?P<unit>\D.*)?", re.ASCII)

_MINUTE = 60.0
_HOUR = 3600.0
_DAY = 86400.0
_WHOLE = 1e-6
"""How near a share must be to one to be written as all."""

_DURATION: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # micro sign U+00B5
    "μs": 1e-6,  # Greek mu U+03BC, which most keyboards give
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": _MINUTE,
    "min": _MINUTE,
    "h": _HOUR,
    "d": _DAY,
}
_PER_SECOND: Mapping[str, float] = {
    "/s": 1.0,
    "/sec": 1.0,
    "/min": 1 / _MINUTE,
    "/h": 1 / _HOUR,
    "/hour": 1 / _HOUR,
    "/d": 1 / _DAY,
    "/day": 1 / _DAY,
}
_BYTES: Mapping[str, float] = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "PB": 1e15,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
    "PiB": 2.0**50,
}
_BITS = {"": 1 / 8, "k": 1e3 / 8, "M": 1e6 / 8, "G": 1e9 / 8, "T": 1e12 / 8}
_BANDWIDTH: Mapping[str, float] = {
    **{f"{unit}/s": scale for unit, scale in _BYTES.items()},
    **{f"{prefix}bit/s": scale for prefix, scale in _BITS.items()},
    **{f"{prefix}bps": scale for prefix, scale in _BITS.items()},
}
_USD_PER_HOUR: Mapping[str, float] = {
    "/h": 1.0,
    "/hr": 1.0,
    "/hour": 1.0,
    "/s": _HOUR,
    "/min": 60.0,
    "/d": 1 / 24,
    "/day": 1 / 24,
}
_GRAMS_PER_KWH: Mapping[str, float] = {"g/kWh": 1.0, "kg/kWh": 1e3, "kg/MWh": 1.0, "t/MWh": 1e3}
_USD_PER_KWH: Mapping[str, float] = {"/kWh": 1.0, "/MWh": 1e-3}
_USD_PER_TONNE: Mapping[str, float] = {"/t": 1.0, "/kg": 1e3}
_COUNT: Mapping[str, float] = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _number(value: float, *, what: str, field: str | None, shown: str) -> float:
    if not math.isfinite(value):
        raise InputError(f"{what} {shown} is not a finite number", field=field)
    if value < 0:
        raise InputError(f"{what} {shown} is negative", field=field, hint="use zero or more")
    return value + 0.0  # turns -0.0 into 0.0


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of quantity: reads text with one of its units, or a number, into the base unit."""

    what: str
    units: Mapping[str, float]
    """What each unit is in the base unit."""
    examples: tuple[str, ...]
    is_usd: bool = False
    """Whether text may say "$" or "USD"; either may be left out, the "per hour" may not."""

    def __call__(self, value: str | float, *, field: str | None = None) -> float:
        """Read a value; what is wrong is an InputError that names `field` and shows examples."""
        what, hint = self.what, "write it like " + ", ".join(self.examples)
        # In Python True and False are ints.
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise InputError(f"expected a {what}, got {kind} {value!r}", field=field, hint=hint)
        shown = repr(value)
        if not isinstance(value, str):
            try:
                number = float(value)
            except OverflowError:
                # A whole number that is too large for a float.
                number = math.inf
                shown = "given"
            return _number(number, what=what, field=field, shown=shown)
        if self.is_usd and not value.lstrip().startswith("$"):
            value = re.sub(r"\s*USD\s*(?=/)", "", value, flags=re.IGNORECASE)
        match = (_PRICE if self.is_usd else _QUANTITY).fullmatch(value.strip())
        if match is None:
            raise InputError(f"cannot read {shown} as a {what}", field=field, hint=hint)
        unit = "".join((match["unit"] or "").split())
        # Nothing is nothing in any unit.
        if not unit and float(match["number"]) == 0:
            return 0.0
        if unit not in self.units:
            problem = f"unknown unit {unit!r}" if unit else "it has no unit"
            raise InputError(f"cannot read {shown} as a {what}: {problem}", field=field, hint=hint)
        number = float(match["number"]) * self.units[unit]
        return _number(number, what=what, field=field, shown=shown)


parse_duration = Quantity("duration", _DURATION, ("1600ms", "1.6s", "5min"))
"""Read a duration into seconds; units ns, us, ms, s, m or min, h, d."""
parse_rate = Quantity("rate", _PER_SECOND, ("10/s", "600/min", "36000/h"))
"""Read a rate into events per second; written per s, min, h or day."""
parse_bytes = Quantity("size", _BYTES, ("24GB", "80GiB", "512MB"))
"""Read a size into bytes; kB, MB, GB, TB are powers of 1000 and KiB, MiB, GiB, TiB of 1024."""
parse_bandwidth = Quantity("bandwidth", _BANDWIDTH, ("600GB/s", "10Gbit/s", "100Mbps"))
"""Read a bandwidth into bytes/s; accepts bytes ("600GB/s") and bits ("10Gbit/s", "10Gbps")."""
parse_price = Quantity("price", _USD_PER_HOUR, ("$1.86/h", "1.86 USD/h", "$44.6/day"), is_usd=True)
"""Read a price into US dollars per hour; written "$1.86/h" or "1.86 USD/h"."""
parse_intensity = Quantity("carbon intensity", _GRAMS_PER_KWH, ("400 g/kWh", "0.4 kg/kWh"))
"""Read what electricity emits into g CO2 per kWh; written "400 g/kWh" or "0.4 kg/kWh"."""
parse_energy_price = Quantity(
    "price of energy", _USD_PER_KWH, ("$0.2/kWh", "0.2 USD/kWh"), is_usd=True
)
"""Read a price of energy into US dollars per kWh; written "$0.2/kWh"."""
parse_carbon_price = Quantity(
    "price of carbon", _USD_PER_TONNE, ("$100/t", "100 USD/t"), is_usd=True
)
"""Read a price of carbon into US dollars per tonne of CO2; written "$100/t"."""
_read_count = Quantity("count", _COUNT, ("8192", "8k", "1.5M", "70B"))


def parse_share(text: str, *, field: str | None = None) -> float:
    """Read "0.1%" or "0.001" as a share of 0 to 1."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    # NaN, for what is no number, fails the comparison.
    if rest or not 0 <= value <= 1:
        raise InputError(
            f"cannot read {text!r} as a share", field=field, hint="write it like 0.1% or 0.001"
        )
    return value


def parse_count(value: str | float, *, field: str | None = None) -> int:
    """Read a whole number of things (tokens, parameters); "8k" is 8000, "32.8B" is 32.8e9."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value  # exact, however large
    number = _read_count(value, field=field)
    # Numbers such as 32.8B are not exact in binary.
    if abs(number - round(number)) > 1e-9 * max(1.0, number):
        raise InputError(f"count {value!r} is not a whole number", field=field)
    return round(number)


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def _digits(value: float, digits: int = 4, min_decimals: int = 0) -> str:
    """Write with so many significant digits, without an exponent where that stays readable."""
    if value == 0:
        return f"{0:.{min_decimals}f}"
    exponent = math.floor(math.log10(abs(value)))
    if not -6 <= exponent < 15:
        return f"{value:.{digits - 1}e}"
    decimals = max(min_decimals, digits - 1 - exponent)
    text = f"{value:.{decimals}f}"
    if "." in text:
        whole, fraction = text.split(".")
        fraction = fraction[:min_decimals] + fraction[min_decimals:].rstrip("0")
        text = f"{whole}.{fraction}" if fraction else whole
    return text


def _format_scaled(value: float, steps: Sequence[tuple[str, float]], digits: int = 4) -> str:
    """Write in the largest unit whose scale the rounded value reaches; `steps` ascend."""
    # Rounded first: 999.96ms is written as 1s.
    rounded = _significant(value, digits)
    unit, scale = steps[0]
    for candidate, size in steps[1:]:
        if abs(rounded) >= size:
            unit, scale = candidate, size
    return f"{_digits(rounded / scale, digits)}{unit}"


def format_duration(seconds: float) -> str:
    """Write seconds as "1.6s", "250us", "3h": four significant digits, one unit."""
    steps = [(unit, _DURATION[unit]) for unit in ("ns", "us", "ms", "s", "min", "h", "d")]
    return "0s" if seconds == 0 else _format_scaled(seconds, steps)


def format_elapsed(seconds: float) -> str:
    """Write how long something has lasted, in whole seconds and at most two units: "5min 53s", "2d 3h"."""
    left = max(0, round(seconds))
    counts: list[tuple[int, str]] = []
    for unit in ("d", "h", "min", "s"):
        number, left = divmod(left, round(_DURATION[unit]))
        # What is less than the second unit says nothing any more: nobody wants the seconds of days.
        if number or counts:
            counts.append((number, unit))
    return " ".join(f"{number}{unit}" for number, unit in counts[:2] if number) or "0s"


def format_rate(per_second: float) -> str:
    """Write events per second as "12.5/s"; slow rates become "/min" or "/h"."""
    if per_second == 0 or per_second >= 0.1:
        return f"{_digits(per_second)}/s"
    if per_second >= 1 / _MINUTE:
        return f"{_digits(per_second * _MINUTE)}/min"
    return f"{_digits(per_second * _HOUR)}/h"


def format_bytes(size_bytes: float) -> str:
    """Write bytes in decimal units: "24GB", "1.5MB"."""
    return _format_scaled(
        size_bytes, [(unit, _BYTES[unit]) for unit in ("B", "kB", "MB", "GB", "TB")]
    )


def format_bandwidth(bytes_per_s: float) -> str:
    """Write bytes/s in decimal units: "600GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_usd(usd: float, *, sign: bool = True, decimals: int = 2) -> str:
    """Write US dollars to the cent, "$1,234.50", and below ten cents with two digits, "$0.042".

    Without `sign` for a column whose head says that it holds dollars; with three `decimals` where cents are
    too coarse, as for a million tokens.
    """
    fixed = abs(usd) >= 0.095 or usd == 0
    return f"{'$' if sign else ''}{f'{usd:,.{decimals}f}' if fixed else f'{usd:.2g}'}"


def format_price(usd_per_hour: float) -> str:
    """Write US dollars per hour as "$17.76/h", with the digits of `format_usd`."""
    return f"{format_usd(usd_per_hour)}/h"


def format_share(share: float) -> str:
    """Write a share as a percentage of three digits: "83.1%", "0.04%"; only the whole is "100%"."""
    percent = 0.0 if abs(share) < 1e-7 else 100.0 * share
    # Three digits would round it to 100%.
    if 99.9 < percent < 100 * (1 - _WHOLE):
        return "99.9%"
    return f"{percent:,.0f}%" if abs(percent) >= 999.5 else f"{percent:.3g}%"


def format_throughput(per_s: float) -> str:
    """Write what flows per second with three digits at least, "6,459/s", "2.59/s"; never per minute."""
    return f"{per_s:,.0f}/s" if per_s >= 99.95 else f"{per_s:.3g}/s"


def format_count(count: float) -> str:
    """Write a number of things as "950", "8.192k", "32.8B"."""
    return _format_scaled(count, [(unit, _COUNT[unit]) for unit in ("", "k", "M", "B", "T")])


def pluralize(number: int, noun: str) -> str:
    """Write a number of things: "1 node", "3 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
