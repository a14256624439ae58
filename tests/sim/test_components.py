"""Encoders and generators beside the llm."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.errors import InputError, UnknownNameError
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimComponent, SimOptions
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, problem, requests, whole

OWN = problem()
PLAN = whole(OWN)


def _with_images(arrival: list[float], items: list[int]) -> Requests:
    plain = requests(arrival, 100, 10)
    classes = (np.array(items) > 0).astype(np.int16)
    return Requests(
        plain.arrival_s,
        plain.model,
        classes,
        plain.input,
        plain.output,
        ("",),
        ("text", "image"),
        np.array(items, np.int16),
    )


def _run(work: Requests, **options: object) -> object:
    return simulate(PLAN, OWN, CATALOG, work, SimOptions(**options))  # type: ignore[arg-type]


def test_images_fan_out_over_encoders_and_all_must_be_done() -> None:
    alone = simulate(PLAN, OWN, CATALOG, requests([0.0], 100, 10)).requests
    found = simulate(
        PLAN,
        OWN,
        CATALOG,
        _with_images([0.0], [5]),
        SimOptions(
            components=(SimComponent("vision", servers=2, item_s=0.5),),
            classes={"image": (("vision",), ("llm",))},
        ),
    )
    # Five images on two encoders: three rounds of half a second.
    assert found.requests.ttft_s[0] == pytest.approx(1.5 + alone.ttft_s[0])
    assert found.component_busy["vision"] == pytest.approx(2.5 / (2 * found.clock_s))


def test_encoders_side_by_side_and_a_generator_after() -> None:
    alone = simulate(PLAN, OWN, CATALOG, requests([0.0], 100, 10)).requests
    found = simulate(
        PLAN,
        OWN,
        CATALOG,
        _with_images([0.0], [4]),
        SimOptions(
            components=(
                SimComponent("vision", servers=1, item_s=0.25, fixed_s=0.1, batch=4),
                SimComponent("audio", servers=4, item_s=2.0),
                SimComponent("painter", servers=1, item_s=3.0, batch=8),
            ),
            classes={"image": (("vision", "audio"), ("llm",), ("painter",))},
        ),
    )
    # The slower of the two encoders decides; the generator makes four items at once.
    assert found.requests.ttft_s[0] == pytest.approx(2.0 + alone.ttft_s[0])
    assert found.requests.e2e_s[0] == pytest.approx(2.0 + alone.e2e_s[0] + 12.0)


def test_text_skips_what_it_does_not_need() -> None:
    found = simulate(
        PLAN,
        OWN,
        CATALOG,
        _with_images([0.0, 50.0], [0, 1]),
        SimOptions(
            components=(SimComponent("vision", servers=1, item_s=1.0),),
            classes={"image": (("vision",), ("llm",))},
        ),
    )
    assert found.requests.ttft_s[1] - found.requests.ttft_s[0] == pytest.approx(1.0)


def test_components_must_exist_and_take_time() -> None:
    with pytest.raises(UnknownNameError, match="component"):
        _run(_with_images([0.0], [1]), classes={"image": (("vision",),)})
    with pytest.raises(InputError, match="alone"):
        _run(
            _with_images([0.0], [1]),
            classes={"image": (("vision", "llm"),)},
            components=(SimComponent("vision", servers=1, item_s=1.0),),
        )
    with pytest.raises(InputError, match="takes some time"):
        SimComponent("vision", servers=1, item_s=0.0)
