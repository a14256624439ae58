"""What a plan draws, in words: each objective in its own unit."""

from __future__ import annotations

import pytest

from atoll.plan.footprint import PowerUse
from atoll.report.plan.rented_tables import describe_power


@pytest.mark.parametrize(
    ("value", "bound", "said"),
    [
        (
            4.78e-5,
            2.18e-5,
            "Bound by the capacity model: nothing within its settings needs less than 0.0218 kg CO2/h",
        ),
        (1.59, 0.8, "nothing within its settings needs less than 800 W (gap 49.7%)."),
        (
            9.5,
            9.4,
            "As weighed: 9.5 an hour. Bound by the capacity model: nothing within its settings is below 9.4",
        ),
        (9.5, None, "As weighed: 9.5 an hour. No bound is known."),
        (1.59, None, "0.0478 kg CO2/h. No bound is known."),
    ],
)
def test_what_was_made_small_is_said_in_its_unit(
    value: float, bound: float | None, said: str
) -> None:
    use = PowerUse(
        watts=1590, kg_per_hour=0.0478, weighted_usd_per_hour=value, weighted_bound=bound
    )
    text = describe_power(use)
    assert said in text
    assert text.startswith("Draws 1.59 kW, 0.0478 kg CO2/h.")
