"""Renting: which templates stand where, so that all demand is met at the least cost.

optimal      a problem to an allocation to a plan: the default solver
allocation   the allocation itself; `types` is its vocabulary, `answer` its result
columns      templates in regions as columns; `relaxation` bounds them, `standing` is the best so far
search       exact search: pairs/ for few regions and offers, mixes/ for many
scarcity     what to do when demand cannot be met
markets      which offer each rented node comes from
baselines    simple ways to rent, to compare with
"""
