"""Where the next request goes: the same decisions in the simulator and in the gateway.

    decisions  plain functions over arrays: interleaved weighted round robin, masks, alternatives
    tables     the edges of a plan's instance, or of its instances, as arrays
    pipelines  every request gets its own pipeline over the nodes of an instance
    instances  every request gets an instance of each phase of its service
    reweight   what is left of the flows when nodes die
    compiled   `decisions` through numba, for the simulator

Nothing here does I/O, reads a clock or needs numba, except `compiled`.
"""
