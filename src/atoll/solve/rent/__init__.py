"""Renting: which templates stand on which machines, so that all demand is met at the least cost.

Begin with `rent_solver`, which has the solvers by name, then `optimal` and `allocation` (the problem as a
program, in its docstring).

rent_solver        problem to plan, by the name of a solver; the family's entry in `solve.registry`
optimal            the default solver: problem to allocation to plan
allocation         the cheapest allocation with proof; `allocation_types` has its questions and answers
rent_search        which search when; `scarcity` where demand cannot be met; `greedy_allocation` a first one
items              templates in regions and running instances, as arrays; `RentModel`
rental_program     the linear program's part that rents machines; on it `instance_master`, `mix_master`
relaxation         the Lagrangian bound; it asks `service_oracle`, whose costs are `step_functions`
template_pool      templates that can matter, where there are very many; `rounding` dives for whole mixes then
many/              the same where services are very many and cannot all be served: region by region
simple_allocation  the simplest one for little more than the cheapest
incumbent          best solution, bound, deadline and counted work of a search
capped/            sharper bounds where machines are scarce
fast/              the heuristic solver "fast"
choosing/          shares of models where several may answer, decided with the rest
rent_baselines     published rules to compare with

Imports `solve.templates` and the modules of `solve` itself; not `place` or `graph`.
"""
