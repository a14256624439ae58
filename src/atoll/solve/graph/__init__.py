"""Plans of any-to-any graphs on executors: which parts of a model share one, where, and how requests go.

A part is a component of a model, or a phase of its llm. An executor runs a set of parts on a slice of a
machine. Begin with `graph_solver`, then `graph_types`, which has the program in its docstring.

graph_solver      problem to plan, by the name of a solver; the family's entry in `solve.registry`
graph_types       the program in numbers: executors, classes of requests, machines, the answer
executor_options  which parts may share an executor
graph_build       problem to program; `graph_to_plan` turns the answer into a plan
executor_program  the search: relaxation, integer program, bound; `presolve` drops types that nobody needs
executor_master   the linear program, which grows by executor types; `program_table` has it as arrays
program_answers   whole numbers of executors to exact flows
patterns          traffic between machines within their NICs; `boxes`, `pattern_master` are its parts
matching          flows taken apart into paths of single requests; `executor_packing` puts them on machines
equal_cells       Cornserve's cells of equal GPUs, a baseline
room              how much room executors of a plan have, to plan again with the same

Imports `solve.templates`, the modules of `solve` itself, and of `rent` only how templates are counted.
"""
