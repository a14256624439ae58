"""Control of a running fleet: decides what to change, carries it out, and tries both in virtual time.

    decision/    from what is seen and remembered to actions; no I/O, no clock
    operation/   observes targets and gateways, asks `decide`, carries out, writes down
    virtual/     the same decisions against days of drawn or recorded traffic, in seconds

Start reading at `decision/decide.py`, then `operation/control_loop.py`. May import everything but `api`,
`planner`, `dashboard` and `cli`; `decision` knows nothing of `operation`, and neither knows `virtual`.
"""
