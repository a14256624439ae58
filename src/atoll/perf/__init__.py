"""How long a step takes and what memory it needs.

    operators -> layers -> step        the analytic time model, on constants fitted per GPU
    step_tables, aic                   other backends behind the same interface (`step.StepModel`)
    memory_model                       what fits beside how many layers
    capacity, mixed_capacity           tokens/s of a node within a latency budget, alone or as tables
    queueing, operating_point, energy  waits, the batch that a load leads to, and its joules
    compare, step_curves               whole copies of a model on a node with their price; curves
    measurements, calibration          fitting the constants
    components/                        the same for parts of any-to-any models

Start reading at `operators` (the formula) and `capacity` (what planners ask for).
May import `catalog`, `engines`, `workload` and `core`.
"""
