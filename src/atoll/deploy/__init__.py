"""Where instances stand: processes here, Slurm jobs, Kubernetes pods, rented machines; one door to all."""
