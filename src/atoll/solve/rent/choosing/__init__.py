"""Which models answer, chosen together with the machines: levels of ways, exact where a problem is small.

Begin with `solver`, its place among the solvers, and `choose`: what each way serves.

    level_choice          the cheapest levels and their allocation, as arrays
    level_rows            conditions on levels: every choice answered, errors and floors kept
    masters               programs of the allocator with levels in front
    bound, decomposition  lower bound on the cost of any mix, and the prices for it
    joint_fleet           the fleet as GH's and AGH's problem, and their plans
    search                which search when, and the search itself

May import `solve.rent`, `solve.templates`, `solve.joint`, the modules of `solve` itself, `plan`, `catalog`
and `core`.
"""
