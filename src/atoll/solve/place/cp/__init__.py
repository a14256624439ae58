"""Replicas per GPU type by simulated latency: OpenFabric's scheduler as a solver, with its baseline.

cp_solver       the solvers `cp` and `memp`, and our own search by latency; begin here
replica_shapes  how a replica runs (GPU type, tensor parallel, stages), what it carries, and its plan
latency_table   simulated latencies of services by their replicas, filled as far as they are asked for
lazy            solve, fill what the solution uses, solve again, until all that it uses is known
cp_masters      which replicas to set up, given a table: CP-SAT in a process of its own, or merged fronts
cp_worker       that process: nothing else imports ortools

Imports `place` and the modules of `solve` itself.
"""
