"""GH/AGH's joint problem beyond its heuristics, which are in `atoll.solve.joint`.

paper_instances   the paper's instances, rebuilt with stated seeds
exchange/         ours: few active pairs, exchanged one by one
exact/            the proven optimum: a search over what is open, bounded by tolls
stage2            cost of a placement under scenarios of delay, error and demand
robust            the placement with the lowest mean cost over scenarios
rolling           a day of drifting demand: one placement kept, or planned anew in every window
"""
