"""Virtual time: a controller, or one it is compared with, operates a fleet for days of traffic in seconds.

Start reading at `virtual_run`.

    virtual_run           an operator in a world, minute by minute, and what that cost and kept
    world, market         instances and machines, prices and losses
    virtual_demand        requests per minute, from a trace or drawn
    fluid                 which requests keep their promises; `fluid_calibration` fits it to the simulator
    contenders            Atoll and what it is compared with; `operator_comparison` runs them all
    template_planner      a fast planner over templates that were sized once
    executor_planner      the same over executors of any-to-any services; `executor_calibration` finds them,
                          `executor_fluid` says how loaded each class's are
    operation_page        the HTML page

May import everything below `control`, and `decision`.
"""
