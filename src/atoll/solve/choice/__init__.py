"""Which model and which GPUs answer which kind of query: the joint problem of GH and AGH.

problem     the problem (5a) to (5k) as arrays, an answer to it, what the answer costs
instances   the paper's instances, rebuilt with stated seeds
check       whether an answer keeps every constraint, by plain loops
candidates  configurations that are worth opening
opening     good sets of them by exchange, for a first answer
exact       the proven optimum
gh          the paper's greedy heuristic
agh         the paper's adaptive one
exchange    ours: few active pairs, exchanged one by one
anchors     where it starts from
steps       from one set of offers to a cheaper one
estimates   what one more offer would come to
routing     all types routed to a set of offers, and what that costs
prices      what FLOP/s, memory and storage of a set are worth to types
ways        how a type can be answered by a set of offers
offers      pairs in a configuration, worth a look
greedy      what GH and AGH build answers with
tables      the problem by pair, for compiled code
operate     what a placement costs under scenarios of delay, error and demand
rolling     a day of drifting demand: one placement kept, or planned anew
"""
