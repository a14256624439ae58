"""Problems into plans: every solver, behind one call.

registry    `solve(problem)`: picks the solver, makes what it needs, checks its plan
templates/  every useful layout of a role over unlike nodes, exactly
rent/       the cheapest instances of templates on offer, with a proven bound; baselines
place/      layers on machines that are there, network and all; baselines
explain/    what binds, what loosening it is worth, what would repair a plan
assembly    chosen layouts into a plan: flows, routes, cost
comparison  a plan beside those of other solvers
lp, cover   HiGHS, and covering functions, shared by the solvers
"""
