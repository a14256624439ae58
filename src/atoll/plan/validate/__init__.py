"""The validator: whether a plan keeps what it says, without trusting the solver that made it.

Begin with `check.check`: it lists every `Violation` of a plan, whoever made it. The rules, by subject:

    validate_instance, validate_machines    layers, memory and flows of one instance; what is rented
    validate_routes, validate_handover      requests and KV cache on their way, what is served
    validate_engine, validate_stated        engines; models, launches and promises as they are stated
    validate_spot                           requests on spot
    validate_cluster                        instances on machines of a fixed cluster
    validate_executors, validate_choice     any-to-any models; mixes of models
    violation                               a broken rule, and the error that lists them

May import `plan`, `perf`, `workload`, `catalog` and `core`; never `solve`, whose answers it checks.
"""
