"""A plain roofline beside the performance model, on what was measured."""

from __future__ import annotations

import numpy as np

from atoll.catalog import Catalog
from benchmarks.placement.roofline import ours_on, put_together, read_steps, roofline_on


def test_a_roofline_is_a_lower_bound_on_measured_steps_and_further_off_than_the_model() -> None:
    catalog, steps = Catalog.default(), read_steps()
    ideal, model = roofline_on(catalog), ours_on(catalog, "atoll")
    measured = np.array([step.seconds for step in steps])
    bound = np.array([step.predicted_s(ideal) for step in steps])
    predicted = np.array([step.predicted_s(model) for step in steps])
    assert (bound < measured).all()
    assert (bound <= predicted).all()
    assert np.median(np.abs(predicted / measured - 1.0)) < 0.10


def test_requests_are_a_prompt_and_the_steps_of_their_answer() -> None:
    requests = put_together(read_steps())
    assert {request.answer for request in requests} == {64, 256, 1024}
    for request in requests:
        assert request.prompt.model == request.token.model
        assert request.prompt.batch.prefill_sequences == 1
        assert request.token.batch.decode_sequences == 1
        expected = request.prompt.seconds + (request.answer - 1) * request.token.seconds
        assert request.seconds == expected
