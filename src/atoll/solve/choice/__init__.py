"""Which model and which GPUs answer which kind of query: the joint problem of GH and AGH.

problem     the problem (5a) to (5k) as arrays, an answer to it, what the answer costs
"""
