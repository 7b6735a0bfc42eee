"""Launching jobs on a cluster: the sbatch file, the processes on each node, and the verdict on why
a job ended. The bash part is in `launch/slurm/job.sh`, which admins can read and edit, and which
calls `python -m hybridflow.launch STEP`.
"""
