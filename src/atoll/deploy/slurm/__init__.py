"""Instances as Slurm jobs, in user space: scripts, the queue, and what the partitions offer."""
