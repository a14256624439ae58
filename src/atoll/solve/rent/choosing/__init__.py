"""Which models answer, chosen together with the machines: levels of ways, exact where a problem is small.

`rows` are the conditions on levels, `masters` the programmes that have them in front, `bound` what no mix of
models can go below and `decomposition` the prices for it, `search` the search, `choose` what is asked and
answered, `solver` its place among the solvers.
"""
