"""Operating a fleet: observing targets and gateways, carrying out what was decided, writing it down.

Start reading at `control_loop` (one turn), then `operated` (how a fleet is put together for it).

    control_loop, operated, live_operation   turn by turn, and the loop around it
    rollout, takedown, dry_run               bringing a fleet up and down, and showing what would happen
    targets, orders                          which target has which machines, and what is started there
    gateways, rhythm, entrance               traffic, its usual rates, hub and gateway processes
    fleet_home, fleet_history, fleet_status  the fleet's folder, its log, and how it is
    controller_lease, approval, fleet_change who may act, who agreed, and to what
    fleet_operator                           fleets as objects of a Kubernetes cluster
    operated_plans, options                  the planner that is asked, and what people set

May import `decision` and everything below `control`; not `virtual`.
"""
