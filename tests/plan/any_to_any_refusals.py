"""What plans with any-to-any services refuse: the table of docs/any-to-any.md, made by asking for each.

    python -m tests.plan.any_to_any_refusals    writes it

A row is something that plans of plain models have. It is asked for, and what the code says to it is the row's
reason; what is not refused any more has no row. A new thing of that kind gets a line in `ASKED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from atoll.cli.simulate import REFUSED_FOR_TASKS
from atoll.control.virtual.operation import simulate_operation
from atoll.core.errors import AtollError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove.robust.robust_plan import refuse_unfit
from atoll.solve.graph.graph_solver import refuse_limits
from atoll.solve.rent.choosing.solver import refuse_others
from atoll.solve.weighted import refuse_unweighable
from tests.plan import graphs

PAGE = Path(__file__).parents[2] / "docs" / "any-to-any.md"
BEGIN, END = "<!-- refusals: begin -->", "<!-- refusals: end -->"
_ELSEWHERE = "nothing-of-this-name"
"""Name of what is not there: errors with it come after all refusals."""

SEE: dict[str, object] = {
    "model": "qwen2.5-vl-7b",
    "rate": "1/s",
    "classes": {"text": {"share": 0.5}, "image+text": {"share": 0.5, "images": {}}},
}
"""A service whose parts run on executors."""
PLAIN: dict[str, object] = {
    "model": "qwen3-8b",
    "rate": "1/s",
    "ttft": "1s",
    "tpot": "60ms",
    "lengths": "1000x100",
}
"""A service of a plain model, which may have what is asked for."""
_POOL: dict[str, object] = {
    "offers": [
        {"region": region, "node_type": "A100-80:2", "available": 4, "usd_per_hour": 6.0}
        for region in ("here", "there")
    ]
}
Service = Mapping[str, object]


class Refusal(NamedTuple):
    """A row: what is asked for, where it would be said, and why it is refused."""

    what: str
    where: str
    why: str


def _fleet(service: Service, **sections: object) -> Problem:
    """A fleet with one service on a pool, unless another place for it is given."""
    data = {"services": {"NAME": dict(service)}, **({"pool": _POOL} | sections)}
    return parse_fleet(yaml.safe_dump(data, sort_keys=False))


def _choice(service: Service) -> None:
    """A service beside another that several models may answer."""
    models = [{"model": "qwen3-8b", "error": 0.1}, {"model": "qwen3-32b", "error": 0.05}]
    chat = {**{k: v for k, v in PLAIN.items() if k != "model"}, "models": models}
    data = {"services": {"NAME": dict(service), "chat": chat}, "pool": _POOL}
    refuse_others(parse_fleet(yaml.safe_dump(data, sort_keys=False)))


def _cluster(service: Service) -> None:
    link = {"between": ["*", "*"], "bandwidth": "10Gbit/s"}
    cluster = {"nodes": {"lab": {"A100-80:2": 2}}, "links": [link]}
    data = {"services": {"NAME": dict(service)}, "cluster": cluster}
    parse_fleet(yaml.safe_dump(data, sort_keys=False))


def _shares(service: Service) -> None:
    _fleet(service, pool={"owned": {"lab": {"A100-80:2": {"count": 2, "shares": 2}}}})


def _pipeline(service: Service) -> None:
    """An executor over two machines, as instances of plain models may be."""
    if service is not SEE:
        return
    problem, plan = graphs.problem(), graphs.plan()
    one = plan.executor_instances[0]
    nodes = (one.nodes[0], one.nodes[0].model_copy(update={"id": "n1"}))
    wide = one.model_copy(update={"nodes": nodes, "stages": 2})
    others = tuple(i for i in plan.instances if i.id != one.id)
    for found in validate(plan.model_copy(update={"instances": (wide, *others)}), problem):
        if found.rule == "layers" and found.where == one.id:
            raise AtollError(found.message)


def _virtual(service: Service) -> None:
    simulate_operation(_fleet(service), _ELSEWHERE)


def _limit(**limits: object) -> Callable[[Service], object]:
    return lambda service: refuse_limits(_fleet(service, limits=limits)) if service is SEE else None


def _field(**fields: object) -> Callable[[Service], object]:
    return lambda service: _fleet({**service, **fields})


def _experts(service: Service) -> None:
    model = {"model": "qwen3-30b-a3b"} if service is PLAIN else {}
    _fleet({**service, **model, "engine": {"expert_parallel": True}})


_GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}
ASKED: dict[tuple[str, str], Callable[[Service], object]] = {
    ("standing in several regions at once", "`limits.spread`"): _limit(spread=2),
    ("machines or places that may be lost", "`limits.survive`"): _limit(survive=1),
    ("spot machines that go", "`limits.spot_loss`"): _limit(spot_loss="0.1/h"),
    ("energy or carbon as the objective", "`objective`"): lambda service: refuse_unweighable(
        _fleet(service, objective="energy")
    ),
    ("a choice between models in the fleet", "`services.NAME.models`"): _choice,
    ("a fixed cluster", "`cluster`"): _cluster,
    ("layers over several machines", "a plan's instances"): _pipeline,
    ("shares of GPUs", "`pool`"): _shares,
    ("beginnings that prompts have in common", "`services.NAME.prefix`"): _field(
        prefix={"share": 0.5, "tokens": 160}
    ),
    ("speculative decoding", "`engine.speculative`"): _field(engine={"speculative": _GUESSES}),
    ("experts over several GPUs", "`engine.expert_parallel`"): _experts,
    ("promises for each tenth of requests by length", "`length_deciles`"): _field(
        length_deciles=True
    ),
    ("plans that hold if things turn out otherwise", "`--robust`"): lambda service: refuse_unfit(
        _fleet(service)
    ),
    ("weeks in virtual time", "`atoll operate --simulate`"): _virtual,
}
"""By what is asked and where: asking for it, which raises where it is refused."""


def ask(asked: Callable[[Service], object], service: Service) -> str | None:
    """Return why something is refused beside a service, None where it is not."""
    try:
        asked(service)
    except AtollError as error:
        return None if _ELSEWHERE in str(error) else error.message
    return None


def list_refusals() -> list[Refusal]:
    """Return what is refused, in the order of `ASKED`, and options of `atoll simulate` after it."""
    found = [
        Refusal(*row, why) for row, asked in ASKED.items() if (why := ask(asked, SEE)) is not None
    ]
    found += [
        Refusal("in a simulation", f"`atoll simulate --{name}`", why)
        for name, why in REFUSED_FOR_TASKS.items()
    ]
    return found


def draw_table() -> str:
    """Return the table as Markdown."""
    rows = (f"| {one.what} | {one.where} | {one.why} |" for one in list_refusals())
    return "\n".join(("| What | Where | Why not |", "|---|---|---|", *rows)) + "\n"


def put_table(page: str, table: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(put_table(PAGE.read_text("utf-8"), draw_table()), "utf-8")
