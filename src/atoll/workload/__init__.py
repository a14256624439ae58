"""Demand: requests, their lengths, and when they come.

Begin with `spec` (workloads in words, "azure-conv@10/s for=1h") and `requests` (one row a request).

    arrivals, arrival_rates, rate_files  when requests come, and how their rate moves
    lengths, sampling, classes           how long they are, and what any-to-any requests bring and want
    builtin, synthetic, servegen         workloads that ship with Atoll, are drawn, or come from client pools
    traces, formats, trace_reading, trace_rows, writing
                                         trace files, read within limits, replayed and written
    stats                                rates, burstiness and lengths of any workload

May import `core` alone.
"""
