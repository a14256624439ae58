"""The Slurm target: every instance is a batch job of the user who runs this; nothing is installed by root.

slurm_target     the row in the table of targets; slurm_settings: its fields
slurm_deployer   start, drain, stop and list; start reading here
script           the batch script of an instance
job_folders      what is kept of a job beside Slurm: scripts, secrets, logs, states
slurm_jobs       jobs as squeue tells of them; slurm_pool: nodes and partitions as offers
reasons          Slurm's words as one line and a kind of failure
runner           runs Slurm's commands, with a deadline
"""
