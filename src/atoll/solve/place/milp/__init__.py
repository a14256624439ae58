"""Integer programs of flow placement: they prove optima of small clusters, and check the search.

milp   the solver "flow.milp": starts, model, engine, proof; begin here
model  the paper's program, node by node, one over equal nodes, and the engines that solve them

Imports `place.flow_instance`, `place.bound` and the modules of `solve` itself.
"""
