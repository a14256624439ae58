"""Random small fleets, each made from its seed, for `benchmarks.planner_truth`."""

from __future__ import annotations

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.plan.capacities import role_table
from atoll.plan.plan import Instance, Market, Node
from atoll.plan.problem import Lengths, Limits, Offer, Phases, Problem, Service, Settings
from atoll.solve import solve
from atoll.solve.plan_request import PlanRequest
from tests.reference.rent_ilp import RentReference
from tests.slow.plans.case_runs import Draw

DEADLINE_S = 600.0
REFERENCE_S = 60.0

MODELS = ("llama-3.1-8b", "qwen3-32b", "phi-4-14b", "gpt-oss-20b", "llama-3.2-3b")
# Dollars per hour of one GPU, about what clouds ask.
GPUS = {"T4": 0.5, "L4": 0.8, "A10G": 1.1, "L40S": 1.9, "A100-40": 2.6, "A100-80": 3.6, "H100": 6.5}


class CaseMaker(Draw):
    """Makes the problem of one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(13, seed)
        self.seed = seed
        # Of their own, so that fleets are what they were before there were engines to choose from.
        self.engine_rng = np.random.default_rng([31, seed])

    def problem(self) -> Problem:
        """Return the problem, with what runs now."""
        regions = tuple(f"r/{name}" for name in "abc"[: self.pick((1, 2, 3), (0.4, 0.35, 0.25))])
        offers = self._offers(regions)
        bare = Problem(
            name=f"truth-{self.seed}",
            services=self._services(),
            offers=offers,
            settings=Settings(
                max_nodes_per_instance=self.pick((1, 2, 3), (0.2, 0.4, 0.4)),
                memory_ratio=self.pick((6.0, 12.0, 40.0)),
                init_penalty=self.pick((0.0, 0.05, 0.3, 1.0), (0.5, 0.2, 0.2, 0.1)),
                on_shortage=self.pick(("fraction", "priority", "fail"), (0.6, 0.25, 0.15)),
                engines=self._engines(),
            ),
            overlays=self._links(regions),
        )
        sized = self._with_rates(bare)
        running = self._running(sized) if self.chance(0.5) else ()
        limits = self._limits(sized, regions)
        return sized.replace(running=running, limits=limits)

    def _engines(self) -> tuple[str, ...]:
        """Any layout, or those of one to three engines, in any order of preference."""
        if self.engine_rng.random() < 0.5:
            return ()
        names = ("vllm", "atoll", "sglang")
        size = int(self.engine_rng.integers(1, 1 + len(names)))
        return tuple(names[i] for i in self.engine_rng.permutation(len(names))[:size])

    def _services(self) -> tuple[Service, ...]:
        services = []
        for index in range(self.pick((1, 2, 3), (0.35, 0.4, 0.25))):
            prompt = float(self.rng.integers(100, 3000))
            answer = float(self.rng.integers(10, 400))
            phases: Phases = self.pick(("auto", "apart", "together"), (0.5, 0.3, 0.2))
            services.append(
                Service(
                    name=f"s{index}",
                    model=self.pick(MODELS),
                    ttft_s=self.uniform(0.8, 5.0),
                    tpot_s=self.uniform(0.04, 0.2),
                    rate_per_s=1.0,
                    lengths=Lengths(
                        input_mean=prompt,
                        output_mean=answer,
                        input_mean_square=self.uniform(1.0, 2.5) * prompt**2,
                        output_mean_square=self.uniform(1.0, 2.5) * answer**2,
                    ),
                    phases=phases,
                    headroom=self.pick((1.0, 1.3)),
                    priority=self.pick((1.0, 1.0, 3.0)),
                )
            )
        return tuple(services)

    def _offers(self, regions: tuple[str, ...]) -> tuple[Offer, ...]:
        names = [
            str(n)
            for n in self.rng.choice(
                list(GPUS), self.pick((1, 2, 3, 4), (0.15, 0.3, 0.35, 0.2)), replace=False
            )
        ]
        types = [f"{gpu}:{self.pick((1, 2, 4, 8), (0.45, 0.2, 0.2, 0.15))}" for gpu in names]
        if self.chance(0.3):
            types.append(f"{names[0]}:{self.pick((1, 2, 4, 8))}")
        scarce = self.chance(0.35)
        whole = self.chance(0.25)
        offers: dict[tuple[str, str, str], Offer] = {}
        for region in regions:
            for node_type in sorted(set(types)):
                if len(regions) > 1 and self.chance(0.25):
                    continue
                gpu, _, count = node_type.partition(":")
                usd = GPUS[gpu] * int(count) * self.uniform(0.75, 1.3)
                sold: list[tuple[Market, float]] = []
                if self.chance(0.8):
                    sold.append(("on-demand", 1.0))
                if self.chance(0.4):
                    sold.append(("spot", self.uniform(0.25, 0.7)))
                if self.chance(0.12):
                    sold.append(("owned", self.pick((0.0, 0.1))))
                for market, factor in sold:
                    most = 3 if scarce or market == "owned" else 8
                    offer = Offer(
                        region=region,
                        node_type=node_type,
                        market=market,
                        available=int(self.rng.integers(1, most)),
                        usd_per_hour=round(usd * factor, 3),
                        whole=whole or self.chance(0.1),
                    )
                    offers[offer.key] = offer
        if not offers:
            lone = Offer(region=regions[0], node_type="L40S:1", available=4, usd_per_hour=2.0)
            offers[lone.key] = lone
        return tuple(offers.values())

    def _links(self, regions: tuple[str, ...]) -> tuple[dict[str, object], ...]:
        """Some regions are joined by lines on which KV travels in milliseconds."""
        if len(regions) < 2 or not self.chance(0.5):
            return ()
        gbit = self.pick((1, 10, 100))
        pairs = [
            {
                "between": [a, b],
                "bandwidth": f"{gbit}Gbit/s",
                "latency": f"{self.pick((1, 5, 30))}ms",
            }
            for i, a in enumerate(regions)
            for b in regions[i + 1 :]
            if self.chance(0.8)
        ]
        return ({"links": {"regions": pairs}},) if pairs else ()

    def _with_rates(self, problem: Problem) -> Problem:
        """Give every service a rate that some of the nodes carry: from a part of one to several."""
        catalog = problem.catalog()
        services = []
        for service in problem.services:
            one = self._rate_of_one(problem, catalog, service)
            factor = float(np.exp(self.uniform(np.log(0.1), np.log(5.0))))
            services.append(service.model_copy(update={"rate_per_s": max(0.01, one * factor)}))
        return problem.replace(services=tuple(services))

    def _rate_of_one(self, problem: Problem, catalog: Catalog, service: Service) -> float:
        """Requests/s that a node of some kind carries, or a pipeline of two; 0.1 where none does."""
        role = service.roles[-1]
        stages = min(2, problem.settings.stages)
        kinds = [problem.kinds[i] for i in self.rng.permutation(len(problem.kinds))]
        for kind in kinds:
            table = role_table(problem, catalog, service, role, kind, stages)
            layers = table.shape[2] - 1
            rate = float(max(table[3, 0, layers], table[1:3, -1, layers // 2].max(initial=0.0)))
            if rate > 0.0:
                return rate / (problem.demand(role) / service.rate_per_s)
        return 0.1

    def _limits(self, problem: Problem, regions: tuple[str, ...]) -> Limits:
        budget = None
        if self.chance(0.3):
            reference = RentReference(problem, problem.catalog(), time_limit_s=REFERENCE_S)
            found = reference.min_cost()
            usd = found.value or sum(o.usd_per_hour * o.available for o in problem.offers)
            budget = round(usd * self.uniform(0.4, 1.15), 2)
        return Limits(
            budget_usd_per_hour=budget,
            spot_share=self.pick((0.0, 0.3, 0.5, 0.8)) if self.chance(0.2) else None,
            max_nodes=int(self.rng.integers(2, 9)) if self.chance(0.15) else None,
            spread=2 if len(regions) > 1 and self.chance(0.3) else 1,
        )

    def _running(self, problem: Problem) -> tuple[Instance, ...]:
        """Return the plan of a varied problem: other rates and prices, and often no spot yet."""
        services = tuple(
            s.model_copy(update={"rate_per_s": s.rate_per_s * self.uniform(0.4, 1.5)})
            for s in problem.services
        )
        offers = tuple(
            o.model_copy(update={"usd_per_hour": round(o.usd_per_hour * self.uniform(0.5, 2.0), 3)})
            for o in problem.offers
        )
        lasting = tuple(o for o in offers if o.market != "spot")
        if lasting and self.chance(0.5):
            offers = lasting
        earlier = problem.replace(name="earlier", services=services, offers=offers)
        try:
            plan = solve(earlier, PlanRequest(deadline_s=DEADLINE_S))
        except AtollError as error:
            print(f"  seed {self.seed}: no plan to run before: {error}")
            return ()
        return tuple(self._moved(i) if self.chance(0.4) else i for i in plan.instances)

    def _moved(self, instance: Instance) -> Instance:
        """Return the instance with a cut between two of its stages moved by 4-12 layers."""
        stages = instance.layout()
        if len(stages) < 2 or instance.partial:
            return instance
        which = int(self.rng.integers(0, len(stages) - 1))
        by = int(self.rng.integers(4, 13)) * self.pick((-1, 1))
        cut = stages[which].end + by
        if not stages[which].start < cut < stages[which + 1].end:
            return instance
        old = stages[which].end

        def move(node: Node) -> Node:
            if node.end == old:
                return node.model_copy(update={"end": cut})
            return node.model_copy(update={"start": cut}) if node.start == old else node

        nodes = tuple(move(node) for node in instance.nodes)
        return instance.model_copy(update={"nodes": nodes, "kept": False})
