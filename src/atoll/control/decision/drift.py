"""Tokens that come faster or slower than predicted: what is planned with is not what is served."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.control.decision.control_view import PaceSeen
from atoll.core.ids import Phase
from atoll.perf.operating_point import operating_point
from atoll.perf.step import analytic, step_seconds
from atoll.plan.plan import Instance
from atoll.plan.problem import Problem

MIN_TOKENS = 1_000
"""Fewer tokens say nothing of a pace."""
MAX_DRIFT = 0.1
"""Share by which served and predicted times per token may differ without a word."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Seconds per token of an instance as they came and as they are predicted at its rate of requests."""

    instance: str
    model: str
    node_type: str
    engine: str
    served_s: float
    predicted_s: float

    @property
    def share(self) -> float:
        """By which share tokens take longer than predicted."""
        return self.served_s / self.predicted_s - 1.0

    @property
    def is_large(self) -> bool:
        """Whether it is worth a word."""
        return abs(self.share) > MAX_DRIFT

    def text(self) -> str:
        """Return it in words, with the command that brings predictions back to what is served."""
        served, predicted = self.served_s * 1e3, self.predicted_s * 1e3
        return (
            f"{self.instance}: tokens take {served:.1f} ms where {predicted:.1f} ms are predicted"
            f" ({self.share:+.0%}); measure a server that nobody uses meanwhile, and plan with --overlay"
            f" measured.yaml: atoll profile --server URL --name {self.model} --as {self.node_type} --engine"
            f" {self.engine} -o measured.yaml"
        )


def find_drift(pace: PaceSeen, instance: Instance, problem: Problem) -> Drift | None:
    """Return how far off the predicted time per token is; None where it cannot be compared.

    Only whole models on a node, both phases together, are compared: where phases or layers run apart, what a
    client sees is not the time of a step.
    """
    service = next((one for one in problem.plain_services if one.name == instance.service), None)
    if service is None or pace.tokens < MIN_TOKENS or instance.phase is not Phase.BOTH:
        return None
    catalog, node = problem.catalog(), instance.nodes[0]
    spec = catalog.model(service.model).llm
    if len(instance.nodes) > 1 or node.layers < spec.layers:
        return None
    engine = problem.run_by(instance.engine).engine_of(service)
    steps = analytic(spec, catalog.node(node.kind), tp=node.tp, engine=engine)
    # Copies of the layers share what the node answers.
    rate = pace.rate_per_s / (node.gpus // node.tp)
    point = operating_point(steps, Phase.BOTH, service.lengths.mix(), 0, spec.layers, rate)
    kinds = [(part, step_seconds(steps, batch, 0, spec.layers)) for part, batch in point.steps]
    predicted_s = sum(part * seconds for part, seconds in kinds)
    if predicted_s <= 0.0:
        return None
    return Drift(instance.id, service.model, node.kind, engine.name, pace.token_s, predicted_s)
