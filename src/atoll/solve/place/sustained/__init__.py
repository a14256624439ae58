"""Sustained throughput: the part of a flow that lasts once KV caches must hold all requests in flight.

sustained         the throughput of a placement that lasts, and the flow to send; begin here
balance           flow moved between ways that lead to the same end, for more of it to last
residence         how long a token takes once round its pipeline (compiled)
sustained_kernel  the largest multiple of a flow that lasts, by Little's law (compiled)

Imports `place.flow_instance`, `place.evaluate` and the modules of `solve` itself.
"""
