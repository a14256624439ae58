"""GH and AGH, for a joint problem: which model on which GPUs, in which parallelism, answers which queries.

The problem is that of the paper "Fast Heterogeneous Serving". Begin with `joint_problem`. Fleets are put to
it by `solve.rent.choosing.joint_fleet`. The paper's instances and tables, the proven optimum and a heuristic
of ours are in `research/joint`, outside the package.

joint_problem   the problem (5a) to (5k) as arrays, an answer to it, what the answer costs
joint_check     whether an answer keeps every constraint, by plain loops
joint_tables    the problem by pair, for compiled code
greedy/         the paper's heuristics, GH and AGH

May import `core` only.
"""
