"""The paper's integer program for one template, as a reference to check the exact search against.

For a multiset of nodes k and S stages (Coral 4.2), with stage s at position p(s) = first, middle, last:

    x[s,j] = 1 iff stage s holds j layers      y[s,k] = 1 iff node k stands in stage s
    z[s,j,k] <= x[s,j], z[s,j,k] <= y[s,k]     (maximising pushes z up: no lower link is needed)
    sum_j x[s,j] = 1,  sum_s y[s,k] = 1,  sum_s,j j x[s,j] = L
    maximise T  subject to  T <= sum_j,k T_p(s)[k, j] z[s,j,k]  for every stage s

Throughputs are whole numbers (`whole_rates`), so that results can be compared for equality. HiGHS
comes through scipy and Gurobi through gurobipy where they are installed. CP-SAT runs in a process of its
own: ortools and highspy, which the planner uses, cannot be loaded together.
"""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InternalError, MissingDependencyError, UsageError
from atoll.solve.templates.generate import RoleTables

Rates = NDArray[np.int64]
Solver = Callable[["StageProgram", float], int]


@dataclass(frozen=True)
class StageProgram:
    """One integer program: `rates[s, k, j]` of node k holding j layers in stage s."""

    rates: Rates

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return int(self.rates.shape[0])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.rates.shape[1])

    @property
    def layers(self) -> int:
        """Layers L of the model."""
        return int(self.rates.shape[2]) - 1

    @property
    def variables(self) -> int:
        """Number of variables x, y, z and T."""
        return self.stages * (self.layers + self.nodes + self.layers * self.nodes) + 1


def stage_program(tables: RoleTables, nodes: Sequence[int], stages: int) -> StageProgram:
    """Return the program for a multiset of node types (indices) cut into `stages` stages."""
    if not 1 <= stages <= min(len(nodes), tables.rates.shape[0], tables.layers):
        raise UsageError(f"{stages} stages for {len(nodes)} nodes", field="stages")
    positions = [0] if stages == 1 else [0, *([1] * (stages - 2)), 2]
    rates = tables.steady[stages - 1][positions][:, list(nodes)].astype(np.int64)
    return StageProgram(np.ascontiguousarray(rates))


def whole_rates(tables: RoleTables) -> RoleTables:
    """Return the tables with capacities as whole numbers, small enough that the search counts in ones."""
    return replace(tables, rates=np.floor(tables.rates * min(1e4, tables.scale)))


def best(
    tables: RoleTables, nodes: Sequence[int], solver: Solver, *, time_limit_s: float = 600.0
) -> int:
    """Return the best throughput over all stage counts with a reference solver; rates are whole numbers."""
    most = min(len(nodes), tables.rates.shape[0], tables.layers)
    return max(
        solver(stage_program(tables, nodes, stages), time_limit_s) for stages in range(1, most + 1)
    )


@dataclass
class _Rows:
    """Constraints as a sparse matrix in the making."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[tuple[int, float]], least: float, most: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(least)
        self.high.append(most)


def _rows(program: StageProgram) -> _Rows:
    """Constraints over the variables x, y, z, T in this order."""
    s_, k_, l_ = program.stages, program.nodes, program.layers
    stages, nodes, layers = range(s_), range(k_), range(1, l_ + 1)
    top = program.variables - 1

    def x(s: int, j: int) -> int:
        return s * l_ + j - 1

    def y(s: int, k: int) -> int:
        return s_ * l_ + s * k_ + k

    def z(s: int, j: int, k: int) -> int:
        return s_ * (l_ + k_) + (s * l_ + j - 1) * k_ + k

    out = _Rows()
    for s in stages:
        out.add(((x(s, j), 1.0) for j in layers), 1.0, 1.0)
        flow = ((z(s, j, k), float(program.rates[s, k, j])) for j in layers for k in nodes)
        out.add([(top, -1.0), *flow], 0.0, np.inf)
    for k in nodes:
        out.add(((y(s, k), 1.0) for s in stages), 1.0, 1.0)
    out.add(((x(s, j), float(j)) for s in stages for j in layers), float(l_), float(l_))
    for s, j, k in itertools.product(stages, layers, nodes):
        out.add([(z(s, j, k), 1.0), (x(s, j), -1.0)], -np.inf, 0.0)
        out.add([(z(s, j, k), 1.0), (y(s, k), -1.0)], -np.inf, 0.0)
    return out


def highs(program: StageProgram, time_limit_s: float) -> int:
    """Solve with HiGHS through scipy; a program without a layout gives 0."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingDependencyError("scipy", "calibrate") from error
    rows, top = _rows(program), program.variables - 1
    cost = np.zeros(top + 1)
    cost[top] = -1.0
    whole = np.ones(top + 1)
    whole[top] = 0.0
    ceiling = np.ones(top + 1)
    ceiling[top] = float(program.rates.max(axis=2).sum(axis=1).max(initial=0))
    shape = (len(rows.low), top + 1)
    matrix = coo_array((rows.values, (rows.rows, rows.columns)), shape=shape).tocsr()
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, rows.low, rows.high),
        integrality=whole,
        bounds=Bounds(np.zeros(top + 1), ceiling),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return 0
    if found.status != 0:
        raise TimeoutError(f"HiGHS stopped without a proof: {found.message}")
    return int(round(-found.fun))  # noqa: RUF046 - scipy has no types


def gurobi(program: StageProgram, time_limit_s: float) -> int:
    """Solve with Gurobi; the licence inside the package allows 2,000 variables and constraints."""
    try:
        # Through importlib: its annotations know fewer index types than its methods take.
        gp: Any = importlib.import_module("gurobipy")
    except ImportError as error:
        raise MissingDependencyError("gurobipy", "reference") from error
    s_, k_, l_ = program.stages, program.nodes, program.layers
    with gp.Env(empty=True) as environment:
        environment.setParam("OutputFlag", 0)
        environment.start()
        with gp.Model(env=environment) as model:
            model.Params.TimeLimit = time_limit_s
            model.Params.MIPGap = 0.0
            model.Params.Threads = 1
            layers = range(1, l_ + 1)
            x = model.addVars(s_, layers, vtype="B")
            y = model.addVars(s_, k_, vtype="B")
            z = model.addVars(s_, layers, k_, vtype="B")
            rate = model.addVar(lb=0.0)
            model.addConstrs(x.sum(s, "*") == 1 for s in range(s_))
            model.addConstrs(y.sum("*", k) == 1 for k in range(k_))
            model.addConstr(gp.quicksum(j * x[s, j] for s in range(s_) for j in layers) == l_)
            keys = [(s, j, k) for s in range(s_) for j in layers for k in range(k_)]
            model.addConstrs(z[s, j, k] <= x[s, j] for s, j, k in keys)
            model.addConstrs(z[s, j, k] <= y[s, k] for s, j, k in keys)
            for s in range(s_):
                own = gp.quicksum(
                    int(program.rates[s, k, j]) * z[s, j, k] for j in layers for k in range(k_)
                )
                model.addConstr(rate <= own)
            model.setObjective(rate, gp.GRB.MAXIMIZE)
            model.optimize()
            if model.Status == gp.GRB.INFEASIBLE:
                return 0
            if model.Status != gp.GRB.OPTIMAL:
                raise TimeoutError(f"Gurobi stopped without a proof, status {model.Status}")
            return int(round(model.ObjVal))  # noqa: RUF046 - no types


def cpsat(program: StageProgram, time_limit_s: float) -> int:
    """Solve with CP-SAT in a process of its own."""
    return cpsat_timed(program, time_limit_s)[0]


def cpsat_timed(program: StageProgram, time_limit_s: float) -> tuple[int, float]:
    """Solve with CP-SAT in a process of its own; also return the solver's CPU seconds."""
    message = json.dumps({"rates": program.rates.tolist(), "time_limit_s": time_limit_s})
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference.template_cpsat_worker"],
        input=message,
        capture_output=True,
        text=True,
        timeout=time_limit_s + 60.0,
        check=False,
    )
    if done.returncode == 6:
        raise MissingDependencyError("ortools", "reference")
    if done.returncode != 0:
        raise InternalError(f"CP-SAT's process failed: {done.stderr.strip()[-200:]}")
    answer = json.loads(done.stdout)
    if answer["rate"] is None:
        raise TimeoutError("CP-SAT stopped without a proof")
    return int(answer["rate"]), float(answer["seconds"])
