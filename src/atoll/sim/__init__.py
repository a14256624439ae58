"""Discrete-event simulator: would a plan hold under a workload?

Begin with `api.simulate`, which runs plain llms; `tasks/` is a second event loop for any-to-any models.

    api, sim_options, problem_demand
                            one run: plan, problem, catalog and requests in, a `SimReport` out
    sim_build, instance_history, graphs, sim_links, unit_rows, times, unit_pacing, life
                            from a plan to arrays: instances, routes, links, step times, events
    sim_arrays, sim_kernel  all arrays of a run, and how compiled code reads them
    event_loop, heap, link_traffic, lifetime, solo, stage_units, stepping, reuse
                            the compiled event loop: events, messages, requests, steps, prefix caches
    sim_result, kept_through
                            what happened, per request, service, node and instance, and around losses

May import `core`, `catalog`, `workload`, `perf`, `plan` and `routing`. Compiled functions (`@kernel`) give
the same bits on every run; the exact values in `tests/sim` must stay when they change.
"""
