"""Which model and which GPUs answer which kind of query: the joint problem of GH and AGH.

problem     the problem (5a) to (5k) as arrays, an answer to it, what the answer costs
instances   the paper's instances, rebuilt with stated seeds
check       whether an answer keeps every constraint, by plain loops
exact/      the proven optimum: a search over what is open, bounded by tolls
greedy/     the paper's heuristics, GH and AGH
exchange/   ours: few active pairs, exchanged one by one
tables      the problem by pair, for compiled code
operate     what a placement costs under scenarios of delay, error and demand
robust      the least mean cost over scenarios
rolling     a day of drifting demand: one placement kept, or planned anew
"""
