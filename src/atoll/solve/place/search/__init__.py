"""Local search over placements by annealing with restarts; the same seed gives the same answer.

flow_search     the search: starts, bound, restarts; begin here
restarts        runs of annealing within a budget of counted work
anneal, moves   one run, and its steps (compiled)
flow_kernel     the max flow of a placement, kept up to date while nodes move (compiled)
flow_tables     the arrays that it works on
level_starts    placements to start from, by level of flow
large_clusters  large clusters, site by site

Imports `place.flow_instance`, `place.bound` and the modules of `solve` itself.
"""
