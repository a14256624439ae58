"""Placing: layers on the machines of a fixed cluster, so that the most tokens flow and last.

Begin with `place_solver`; docs/internals/placement.md explains the objectives.

place_solver          problem with a cluster to plan; the family's entry in `solve.registry`
place_service         one service on the cluster by the name of a solver; `fairness` for several services
flow_instance         the cluster as arrays; `from_problem` makes it, `place_to_plan` turns a placement back
placement_candidates  placements for goals beside the largest flow; `placement_polish`, `refine` better them
evaluate, latency     flow of a placement: the largest, and the largest within a promise
replicas              replicas of exact templates on the cluster
simple_placement      the fewest machines, hops and slices that serve all demand well
machine_cuts          machines cut into slices; `coverage` bounds flows however they are cut
bottleneck            machines and links that are full
place_baselines       simple rules to compare with
search/               annealing over placements (compiled)
sites/                large clusters by counts of alike machines
bound/                upper bounds, and lanes, which often reach them
milp/                 integer programs that prove optima of small clusters
sustained/            the part of a flow that lasts once KV caches hold all requests in flight
cp/                   replicas by simulated latency

Imports `solve.templates` and the modules of `solve` itself; not `rent` or `graph`.
"""
