"""Start an experiment on this machine, on others over ssh, on a SLURM cluster, or in the cloud."""
