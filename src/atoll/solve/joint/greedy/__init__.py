"""The paper's heuristics for the joint problem: GH and AGH.

Begin with `gh`: a cover of all types first, then one type after the other to its cheapest pair. `agh` runs it
in many orders and improves each answer; `greedy_steps` has the steps of both, compiled by numba. May import
`solve.joint` and `core`.
"""
