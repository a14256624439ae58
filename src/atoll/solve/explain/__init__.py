"""Why a plan is what it is: which limits bind, what loosening them is worth, which repairs would help.

Begin with `explain_plan`, which plans again to answer; `plan_explanation` holds the answers and their words.

explain_plan      explanations of rented and placed plans; `explain_graph` of plans of any-to-any models
plan_explanation  the answers as data and in sentences; `quality` those about errors of models
planning_again    a planner that remembers every plan it made; `merit` compares plans
solvers           the solvers that it asks
changes           single changes to a problem, each of which only allows more
repairs           the smallest changes that help
break_even        prices at which a node type would be used; `node_types` why it is used or not
engine_limits     the price of running: other engines, and layouts that none of them runs
explain_choices   the price of right answers where several models may answer

Imports every family of `solve`, through `solve.registry` where it can.
"""
