from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import units
from atoll.core.errors import InputError

Parser = Callable[..., float]

PARSERS: list[Parser] = [
    units.parse_duration,
    units.parse_rate,
    units.parse_bytes,
    units.parse_bandwidth,
    units.parse_price,
    units.parse_intensity,
    units.parse_energy_price,
    units.parse_carbon_price,
    units.parse_count,
]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1600ms", 1.6),
        ("1.6s", 1.6),
        (" 250 us ", 250e-6),
        ("250µs", 250e-6),
        ("250\u03bcs", 250e-6),
        ("3ns", 3e-9),
        ("5m", 300.0),
        ("5min", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1e3ms", 1.0),
        (".5s", 0.5),
        ("0s", 0.0),
        ("0", 0.0),
        (2, 2.0),
        (2.5, 2.5),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("10/s", 10.0), ("600/min", 10.0), ("36000/h", 10.0), ("10 / s", 10.0), (3, 3.0)],
)
def test_rates(text: str | float, per_second: float) -> None:
    assert units.parse_rate(text) == pytest.approx(per_second, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24e9),
        ("24 GiB", 24 * 2**30),
        ("1kB", 1e3),
        ("1KB", 1e3),
        ("1KiB", 1024),
        ("2MB", 2e6),
        ("2MiB", 2 * 2**20),
        ("3TB", 3e12),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
        (5, 5),
    ],
)
def test_sizes(text: str | float, size: float) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("600GB/s", 600e9),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("100 Mbps", 12.5e6),
        ("1GiB/s", 2**30),
        (7, 7),
    ],
)
def test_bandwidths(text: str | float, bytes_per_s: float) -> None:
    assert units.parse_bandwidth(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "usd_per_hour"),
    [
        ("$1.86/h", 1.86),
        ("$ 1.86 / hour", 1.86),
        ("1.86 USD/h", 1.86),
        ("1.86usd/hr", 1.86),
        ("1.86/h", 1.86),
        ("$24/day", 1.0),
        ("$0.01/min", 0.6),
        (2, 2.0),
    ],
)
def test_prices(text: str | float, usd_per_hour: float) -> None:
    assert units.parse_price(text) == pytest.approx(usd_per_hour, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_intensity, "400 g/kWh", 400.0),
        (units.parse_intensity, "0.4kg/kWh", 400.0),
        (units.parse_intensity, "0.4 t/MWh", 400.0),
        (units.parse_energy_price, "$0.2/kWh", 0.2),
        (units.parse_energy_price, "200 USD/MWh", 0.2),
        (units.parse_carbon_price, "$100/t", 100.0),
        (units.parse_carbon_price, "0.1 USD/kg", 100.0),
        (units.parse_carbon_price, 85, 85.0),
    ],
)
def test_energy_and_carbon(parse: Parser, text: str | float, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8k", 8000), ("8192", 8192), ("32.8B", 32_800_000_000), ("1.5M", 1_500_000), (7, 7)],
)
def test_counts(text: str | float, count: int) -> None:
    assert units.parse_count(text) == count


def test_large_counts_stay_exact() -> None:
    assert units.parse_count(2**60 + 1) == 2**60 + 1


@pytest.mark.parametrize("text", ["1600", "1600 ", "", "fast", "1600 parsecs", "1.6 s s", "1,6s"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(InputError) as caught:
        units.parse_duration(text, field="slo.ttft")
    assert caught.value.field == "slo.ttft"
    assert repr(text) in str(caught.value)
    assert "1600ms" in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "24"),
        (units.parse_bytes, "24Gb"),  # bits and bytes differ by case alone
        (units.parse_bytes, "24gb"),
        (units.parse_bytes, "24G"),
        (units.parse_bandwidth, "600GB"),
        (units.parse_bandwidth, "600Gb/s"),
        (units.parse_rate, "10"),
        (units.parse_rate, "10 s"),
        (units.parse_price, "$1.86"),
        (units.parse_price, "1.86"),
        (units.parse_price, "€1.86/h"),
        (units.parse_intensity, "400"),
        (units.parse_intensity, "400 g/kwh"),
        (units.parse_energy_price, "$0.2/h"),
        (units.parse_carbon_price, "$100/kWh"),
        (units.parse_count, "8q"),
        (units.parse_count, "1.5"),
    ],
)
def test_ambiguous_or_wrong_units_are_refused(parse: Parser, text: str) -> None:
    with pytest.raises(InputError):
        parse(text)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), -1, -0.5, True, None, [1], 10.0**308 * 10]
)
def test_never_negative_infinite_or_not_a_number(parse: Parser, value: object) -> None:
    with pytest.raises(InputError):
        parse(value)


def test_overflow_is_an_error_not_infinity() -> None:
    with pytest.raises(InputError):
        units.parse_duration("1e400s")
    with pytest.raises(InputError):
        units.parse_duration(10**400)


def test_negative_text_is_refused_as_negative() -> None:
    with pytest.raises(InputError, match="negative"):
        units.parse_duration("-5s")


def test_non_ascii_digits_are_refused() -> None:
    with pytest.raises(InputError):
        units.parse_duration("٣s")  # int() would read it


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_duration(1.6), "1.6s"),
        (units.format_duration(0), "0s"),
        (units.format_duration(0.000250), "250us"),
        (units.format_duration(0.99999), "1s"),  # not "1000ms"
        (units.format_duration(90), "1.5min"),
        (units.format_duration(7200), "2h"),
        (units.format_rate(12.5), "12.5/s"),
        (units.format_rate(0), "0/s"),
        (units.format_rate(1 / 60), "1/min"),
        (units.format_rate(12500), "12500/s"),
        (units.format_bytes(24e9), "24GB"),
        (units.format_bytes(0), "0B"),
        (units.format_bytes(999_999), "1MB"),
        (units.format_bandwidth(1.25e9), "1.25GB/s"),
        (units.format_price(1.86), "$1.86/h"),
        (units.format_price(2), "$2.00/h"),
        (units.format_price(0.0033), "$0.0033/h"),
        (units.format_price(0), "$0.00/h"),
        (units.format_count(32_800_000_000), "32.8B"),
        (units.format_count(950), "950"),
        (units.format_count(8192), "8.192k"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert text == expected


magnitudes = st.one_of(
    st.just(0.0), st.floats(min_value=1e-12, max_value=1e18, allow_nan=False, allow_infinity=False)
)


@pytest.mark.parametrize(
    ("parse", "write"),
    [
        (units.parse_duration, units.format_duration),
        (units.parse_rate, units.format_rate),
        (units.parse_bytes, units.format_bytes),
        (units.parse_bandwidth, units.format_bandwidth),
    ],
)
@given(value=magnitudes)
def test_reading_what_was_written_loses_only_rounding(
    parse: Parser, write: Callable[[float], str], value: float
) -> None:
    text = write(value)
    # Four significant digits, rounded at most twice.
    assert parse(text) == pytest.approx(value, rel=1.1e-3, abs=0)
    assert write(parse(text)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (0.5, "50%"),
        (0.99996, "99.9%"),
        (1.0, "100%"),
        (1e-9, "0%"),
        (2.381, "238%"),
        (12.3, "1,230%"),
    ],
)
def test_shares_are_written_short_and_never_round_to_all(value: float, text: str) -> None:
    assert units.format_share(value) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0.0, "$0.00/h"), (17.755, "$17.75/h"), (0.042, "$0.042/h"), (1234.5, "$1,234.50/h")],
)
def test_money_is_written_to_the_cent(usd: float, text: str) -> None:
    assert units.format_price(usd) == text


@given(value=st.floats(min_value=1e-12, max_value=1e12))
def test_prices_are_rounded_to_the_cent_or_two_digits(value: float) -> None:
    text = units.format_price(value)
    assert units.parse_price(text.replace(",", "")) == pytest.approx(value, rel=0.051, abs=0.0051)
    assert (
        text == units.format_usd(value) + "/h" == "$" + units.format_usd(value, sign=False) + "/h"
    )


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (0.0, "0/s"),
        (2.589, "2.59/s"),
        (0.00123, "0.00123/s"),
        (99.96, "100/s"),
        (6459.4, "6,459/s"),
    ],
)
def test_throughputs_have_three_digits_and_no_exponent(per_s: float, text: str) -> None:
    assert units.format_throughput(per_s) == text


def test_dollars_in_columns() -> None:
    assert units.format_usd(2.4781, sign=False, decimals=3) == "2.478"
    assert units.format_usd(0.0423, sign=False, decimals=3) == "0.042"
    assert units.format_usd(1234.5, sign=False) == "1,234.50"


def test_numbers_of_things() -> None:
    assert [units.pluralize(n, "node") for n in (0, 1, 2345)] == [
        "0 nodes",
        "1 node",
        "2,345 nodes",
    ]


@given(st.integers(min_value=0, max_value=10**15))
def test_counts_survive_writing(count: int) -> None:
    assert units.parse_count(units.format_count(count)) == pytest.approx(count, rel=1e-3)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in PARSERS:
        try:
            value = parse(text)
        except InputError:
            continue
        assert 0 <= value < float("inf")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.6, "1min"),
        (353.0, "5min 53s"),
        (3600.0, "1h"),
        (3605.0, "1h"),
        (7260.0, "2h 1min"),
        (200000.0, "2d 7h"),
    ],
)
def test_how_long_something_lasts(seconds: float, text: str) -> None:
    assert units.format_elapsed(seconds) == text
