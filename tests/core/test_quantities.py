from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.core.quantities import Bandwidth, Bytes, Duration, Rate, UsdPerHour


class Offer(Frozen):
    warmup: Duration
    demand: Rate
    memory: Bytes
    link: Bandwidth
    price: UsdPerHour


GOOD: dict[str, object] = {
    "warmup": "90s",
    "demand": "600/min",
    "memory": "24GB",
    "link": "10Gbit/s",
    "price": "$1.86/h",
}


def test_text_becomes_base_units() -> None:
    offer = Offer.parse(GOOD)
    assert (offer.warmup, offer.memory, offer.link, offer.price) == (90.0, 24e9, 1.25e9, 1.86)
    assert offer.demand == pytest.approx(10.0)


def test_base_units_survive_json() -> None:
    offer = Offer.parse(GOOD)
    assert Offer.from_json(offer.to_json()) == offer


@pytest.mark.parametrize("value", ["90", "-3s", "{brace}", None, True, float("nan")])
def test_a_bad_quantity_names_field_and_fix(value: object) -> None:
    with pytest.raises(InputError) as caught:
        Offer.parse({**GOOD, "warmup": value}, path="fleet.yaml")
    assert str(caught.value).startswith("fleet.yaml: warmup: ")
    assert "\n" not in str(caught.value)


def test_the_hint_of_the_parser_reaches_the_reader() -> None:
    with pytest.raises(InputError, match="1600ms"):
        Offer.parse({**GOOD, "warmup": "90"})


def test_schema_says_text_or_number() -> None:
    schema = Offer.model_json_schema(mode="validation")
    kinds = {option["type"] for option in schema["properties"]["warmup"]["anyOf"]}
    assert kinds == {"string", "number"}
