"""How long a step takes and what memory it needs.

    operators -> layers -> step        the analytic time model, on constants fitted per GPU
    tables, aic                        other backends behind the same interface (`step.StepModel`)
    memory                             what fits beside how many layers
    capacity                           tokens/s of a node within a latency budget, alone or as tables
    compare                            whole copies of a model on one kind of node, with their price
    measurements, calibrate, layer_fit fitting the constants

Start reading at `operators` (the formula) and `capacity` (what planners ask for).
"""
