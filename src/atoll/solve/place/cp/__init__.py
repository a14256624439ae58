"""Replicas per GPU type by simulated latency: OpenFabric's scheduler as a solver, with its baseline.

shapes       ways to run a replica (GPU type, tensor parallel, stages), and what one carries
table        simulated latencies of services by their replicas, filled as far as they are asked for
lazy         solve, fill what the solution uses, solve again, until all that it uses is known
masters      which replicas to set up, given a table: CP-SAT in a process of its own, or merged fronts
memory_share GPUs in proportion to arrival rate times model size, to compare with
"""
