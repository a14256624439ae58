"""Which model and which GPUs answer which kind of query: the joint problem of GH and AGH.

problem     the problem (5a) to (5k) as arrays, an answer to it, what the answer costs
instances   the paper's instances, rebuilt with stated seeds
check       whether an answer keeps every constraint, by plain loops
candidates  configurations that are worth opening
opening     good sets of them by exchange, for a first answer
exact       the proven optimum
operate     what a placement costs under scenarios of delay, error and demand
rolling     a day of drifting demand: one placement kept, or planned anew
"""
