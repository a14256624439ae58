"""From a plan with executors, or a file that names them, to processes on this machine.

Begin with `deployment`, then `task_endpoint`.

    parts          which components stand for the parts of a model
    parts_file     a file that names parts and components
    deployment     executors and services of a plan
    task_endpoint  executors and their front as processes
    measure        how fast components run here
    core_fit       a CPU core as the catalog describes GPUs, from what was measured
"""
