"""Serving templates: the layout with the largest throughput for every small set of nodes.

Begin with `library`, which makes the template libraries of all roles of a problem.

library          template libraries of a problem, role by role, from the cache where they are there
generate         templates of one role: all multisets of nodes, each laid out optimally
template_kernel  the compiled search for the best layout of one multiset; its docstring has the argument
template_cache   libraries on disk, found by what they were computed from
spectrum         templates of a role beside each other: prices, which are best per dollar

Imports `plan`, `perf`, `catalog`, `core` and the modules of `solve` itself; no family of solvers.
"""
