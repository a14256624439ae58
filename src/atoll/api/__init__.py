"""The front door: what a notebook or a service uses; `import atoll` offers all of it.

    fleet        Fleet: read a fleet file, plan it, explain it
    plan         FleetPlan: a plan that knows its fleet; validate, explain, diff, simulate, save
    report       FleetReport: what a simulation of a plan found
    explanation  FleetExplanation: why a plan is what it is
    diff         FleetDiff: what changes from one plan to the next
    shown        how these show themselves in notebooks and terminals

The command line goes through the same door.
"""
