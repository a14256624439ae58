"""The Python API: everything that a notebook or a service uses; `import atoll` offers all of it.

Begin with `fleet`. Packages that plan, simulate and serve are imported inside the functions that need them.

    fleet              Fleet: read a fleet file or build one, plan it, explain it, bring it up, operate it
    fleet_plan         FleetPlan: a plan that knows its fleet; validate, explain, simulate, serve, bring up
    served_plan        ServeOptions, ServedPlan: a plan that is served on this machine
    running            RunningFleet, FleetOperations: a fleet that was brought up, or operated in virtual time
    this_machine       this machine's GPUs, and a fleet file of them
    fleet_report       FleetReport, FleetTaskReport: what a simulation of a plan found
    fleet_explanation  FleetExplanation: why a plan is what it is
    fleet_diff         FleetDiff: what changes from one plan to the next
    fleet_pareto       FleetPareto: curves of cost against latency, error, energy or carbon
    demo/              the parts of `atoll demo` that are no text
    shown              how these show themselves in notebooks and terminals

The command line goes through the same door.
"""
