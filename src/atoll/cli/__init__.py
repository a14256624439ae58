"""The command line: one file a verb (`plan.py` is `atoll plan`), and a few helpers that verbs share.

Begin with `main`: it finds the verb, imports only that file, and turns errors into one line and an exit code.
A verb declares its options as a model (`options`), calls the Python API or the package of its subject, and
renders with `report`; logic does not live here.

    operating, serving_loop, beside       a terminal that is told of a fleet, serves it, keeps helpers running
    progress                              progress on stderr
    find_gateway, fleet_status            which gateway; the state of fleets
    demo, demo_speech                     `atoll demo` and its steps
    plan_commands, risk, shared_options   further options and output of `atoll plan`; options of several verbs
    perf_facts, calibrate, profile_settings, profile_components, tasks_serve, tasks_trace
                                          parts of `atoll perf`, `atoll profile` and `atoll tasks`

May import every package; no package imports this one. Heavy imports stand inside functions: `atoll --help`
is to answer at once.
"""
