"""Random small fleets with promises, each made from its seed, for `benchmarks.promise_truth`.

Five kinds in turn: rented machines, a limit on spot, a choice between models, an any-to-any model, a fixed
cluster. All are small enough for every plan of three instances to be written down.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.perf.step import Position
from atoll.plan.capacities import node_capacity
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.problem import Problem
from tests.slow.plans.case_runs import Draw

KINDS = ("rent", "spot", "choice", "any-to-any", "cluster")
"""What kinds of fleets there are; the kind of a seed is the one at its remainder."""
MODELS = ("llama-3.1-8b", "phi-4-14b", "qwen3-32b", "llama-3.2-3b", "gpt-oss-20b", "qwen3-8b")
# Dollars per hour of one GPU, about what clouds ask.
GPUS = {"T4": 0.5, "L4": 0.8, "A10G": 1.1, "L40S": 1.9, "A100-40": 2.6, "H100": 6.5}
_MOST_PER_S = 40.0
"""Requests/s of a service at most: what is simulated grows with them."""
_REGION = "r/a"

Fields = dict[str, object]
Given = Mapping[str, object]


def kind_of(seed: int) -> str:
    """Return what kind of fleet a seed makes."""
    return KINDS[seed % len(KINDS)]


def make_fleet(seed: int) -> Problem:
    """Return the fleet of a seed."""
    return _FleetMaker(seed).make()


class _FleetMaker(Draw):
    def __init__(self, seed: int) -> None:
        super().__init__(34, seed)
        self.seed, self.kind = seed, kind_of(seed)
        self.class_rng = np.random.default_rng([43, seed])

    def make(self) -> Problem:
        if self.kind == "any-to-any":
            return self._build({"any": self._any_to_any()}, self._pool(("L4", "L40S", "A100-40")))
        if self.kind == "cluster":
            return self._cluster()
        pool = self._pool(tuple(GPUS), spot=self.kind == "spot")
        if self.kind == "choice":
            return self._sized(self._build({"chat": self._choice()}, pool))
        count = self.pick((1, 2), (0.7, 0.3))
        services = {f"s{index}": self._service(self.pick(MODELS)) for index in range(count)}
        limits: Fields = {}
        if self.kind == "spot":
            limits = {"spot_share": self.pick(("0%", "30%", "50%", "80%"))}
            if self.chance(0.3):
                limits["spot_loss"] = f"{self.pick((0.5, 2.0))}/h"
        return self._sized(self._build(services, pool, limits))

    # Parts of fleets

    def _build(self, services: Given, pool: Given, limits: Given | None = None) -> Problem:
        settings: Fields = {
            "max_nodes_per_instance": self.pick((1, 2), (0.6, 0.4)),
            "init_penalty": 0,
        }
        if self.chance(0.5):
            settings["engines"] = [self.pick(("vllm", "atoll"))]
        return build_problem(
            {
                "name": f"promise-{self.seed}",
                "services": services,
                "settings": settings,
                **({"limits": limits} if limits else {}),
                **pool,
            }
        )

    def _service(self, model: str) -> Fields:
        short = self.chance(0.4)
        fields: Fields = {
            "model": model,
            # Short prompts with a tight promise are where an analytic capacity is furthest off.
            "ttft": f"{self.between(0.25, 1.0) if short else self.between(0.8, 5.0)}s",
            "tpot": f"{self.between(0.04, 0.3)}s",
            "rate": "1/s",
            "lengths": {
                "input": int(self.between(64, 300)) if short else int(self.between(300, 4000)),
                "output": int(self.between(40, 600)),
                "input_cv": self.pick((0.0, 0.5, 1.0)),
                "output_cv": self.pick((0.0, 0.5, 1.0)),
            },
            "phases": self.pick(("auto", "together", "apart"), (0.45, 0.4, 0.15)),
        }
        if self.chance(0.2):
            fields["attainment"] = self.pick(("90%", "99%"))
        if model and self.class_rng.random() < 0.25:
            fields["classes"] = self._text_classes(fields.pop("lengths"))
        return fields

    def _text_classes(self, lengths: object) -> Fields:
        """Few long prompts among many short ones: a share of all requests would hide what they keep."""
        assert isinstance(lengths, dict)
        prompt, answer = int(lengths["input"]), int(lengths["output"])
        longer = int(prompt * self.class_rng.uniform(2.0, 5.0))
        share = int(self.class_rng.choice((4, 10)))
        return {
            "text (short)": {"share": f"{100 - share}%", "input": prompt, "output": answer},
            "text (long)": {"share": f"{share}%", "input": longer, "output": answer},
        }

    def _choice(self) -> Fields:
        models = [str(n) for n in self.rng.choice(MODELS[:4], self.pick((2, 3)), replace=False)]
        errors = sorted(float(f"{e:.3f}") for e in self.rng.uniform(0.01, 0.08, len(models)))
        fields = self._service("")
        del fields["model"]
        # The larger a model, the less it errs.
        sizes = {"llama-3.2-3b": 3, "llama-3.1-8b": 8, "phi-4-14b": 14, "qwen3-32b": 32}
        models.sort(key=lambda name: -sizes[name])
        return fields | {
            "phases": "together",
            "models": [{"model": m, "error": e} for m, e in zip(models, errors, strict=True)],
            "max_error": round(
                errors[0] + self.rng.uniform(0.1, 1.0) * (errors[-1] - errors[0]), 4
            ),
        }

    def _any_to_any(self) -> Fields:
        speech = self.chance(0.6)
        model = "qwen2.5-omni-7b" if speech else "qwen2.5-vl-7b"
        text = {"input": int(self.between(100, 800)), "output": int(self.between(30, 250))}
        image = {"input": 200, "output": 120, "images": {"count": 1, "size": "1280x720"}}
        spoken = {"input": 50, "output": 60, "audio": "8s", "speech": "12s", "ahead": "1s"}
        rare = self.pick((4, 10, 30))
        other = {"audio -> audio": spoken} if speech else {"image+text": image}
        classes: dict[str, Fields] = {"text": {"share": f"{100 - rare}%", **text}}
        classes |= {name: {"share": f"{rare}%", **fields} for name, fields in other.items()}
        return {
            "model": model,
            "rate": f"{self.between(0.5, 8.0)}/s",
            "ttft": f"{self.between(1.0, 5.0)}s",
            "tpot": f"{self.between(0.06, 0.2)}s",
            "classes": classes,
        }

    def _pool(self, gpus: tuple[str, ...], *, spot: bool = False) -> Fields:
        names = self.rng.choice(gpus, self.pick((1, 2, 3), (0.1, 0.5, 0.4)), replace=False)
        offers: list[Fields] = []
        for gpu in names:
            count = self.pick((1, 2, 4), (0.65, 0.25, 0.1))
            usd = GPUS[str(gpu)] * count * float(self.rng.uniform(0.75, 1.3))
            offer: Fields = {
                "region": _REGION,
                "node_type": f"{gpu}:{count}",
                "available": int(self.rng.integers(3, 9)),
                "usd_per_hour": round(usd, 3),
                "whole": self.chance(0.5),
            }
            offers.append(offer)
            if spot:
                cheaper = round(usd * float(self.rng.uniform(0.25, 0.7)), 3)
                offers.append({**offer, "market": "spot", "usd_per_hour": cheaper})
        return {"pool": {"offers": offers}}

    def _cluster(self) -> Problem:
        names = [str(n) for n in self.rng.choice(list(GPUS)[:5], self.pick((1, 2)), replace=False)]
        nodes = {f"{gpu}:1": int(self.rng.integers(1, 4)) for gpu in names}
        links = [{"between": ["*", "*"], "bandwidth": "10Gbit/s", "latency": "200us"}]
        cluster = {"cluster": {"nodes": {"home": nodes}, "links": links}}
        service = self._service(self.pick(MODELS))
        # Machines of a cluster do both phases.
        del service["phases"]
        return self._sized(self._build({"s0": service}, cluster))

    def _sized(self, problem: Problem) -> Problem:
        """Give services rates that a part of a machine to a few of them carry."""
        catalog = problem.catalog()
        services = []
        for service in problem.services:
            one = _carries(problem, catalog, service.name)
            factor = self.between(0.5, 4.0)
            if self.chance(0.5):
                # Just above what the model says that machines carry: may they carry more?
                factor = self.pick((1, 2)) * self.between(1.0, 1.15)
            rate = min(_MOST_PER_S, one * factor)
            services.append(service.model_copy(update={"rate_per_s": float(f"{rate:.3g}")}))
        if problem.choices:
            # Variants answer the same requests.
            rate = float(np.median([service.rate_per_s for service in services]))
            services = [s.model_copy(update={"rate_per_s": rate}) for s in services]
        return problem.replace(services=tuple(services))


def _carries(problem: Problem, catalog: Catalog, name: str) -> float:
    """Return requests/s of a service that one machine of the median kind carries; 0.2 where none does."""
    service = problem.service(name)
    layers = catalog.model(service.model).llm.layers
    role = service.roles[-1]
    rates = []
    for kind in problem.kinds_for(name):
        try:
            rate = node_capacity(
                problem, catalog, service, role, kind, layers, 1, Position.WHOLE, region=_REGION
            )
        except AtollError:
            continue
        rates.append(rate * service.rate_per_s / service.demand(role))
    carrying = sorted(rate for rate in rates if rate > 0.0)
    return carrying[len(carrying) // 2] if carrying else 0.2
