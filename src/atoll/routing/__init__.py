"""Where the next request goes: the same decisions in the simulator and in the gateway.

    decisions  plain functions over arrays: interleaved weighted round robin, masks, alternatives
    route_tables  the edges of a plan's instance, or of its instances, as arrays
    graph_router  walks over tables, around dead vertices; base of the next two
    pipeline_router  every request gets its own pipeline over the nodes of an instance
    instances  every request gets an instance of each phase of its service
    reweight   flows that are left when nodes die
    shares     whose turn it is by shares, `affinity` who served a conversation, `learned` who is fast
    policies   policies by name; `pacing` how many batches a pipeline has under way
    compiled   `decisions` through numba, for the simulator

Begin with `decisions`. Nothing here does I/O, reads a clock or needs numba, except `compiled`. May import
`core`, `catalog`, `workload`, `perf` and `plan`.
"""
