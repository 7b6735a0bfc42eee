"""Launching jobs on a cluster: the sbatch file, the processes on each node, and the verdict on why
a job ended. The bash part is `launch/slurm/job.sh`, which calls `python -m hybridflow.launch STEP`.
Admins can read and edit it.
"""
