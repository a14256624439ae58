"""Placing: layers on the machines of a fixed cluster, so that the most tokens flow and last.

solver       a problem with a cluster to a plan: all placement solvers by name
instance     the cluster as arrays; from_problem makes it, to_plan turns a placement back
search/      annealing over placements (compiled)
bound/       what no placement can exceed, and lanes, which often reach it
milp/        integer programmes that prove optima of small clusters
sustained/   what of a flow lasts once KV caches hold all requests in flight
fairness     several models on one cluster
candidates, refine, polish, latency, evaluate, bottleneck   parts of the above; baselines to compare with
"""
