"""Which models answer, chosen together with the machines: levels of ways, exact where a problem is small.

`rows` are the conditions on levels, `masters` the programmes that have them in front, `bound` what no mix of
models can go below, `search` the search, `choose` what it is asked and answers, `solver` its place among
the solvers.
"""
