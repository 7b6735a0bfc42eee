"""Starting jobs on a cluster: the sbatch file, the processes on each node of the job, and the
reason why a job ended.

The bash part, which admins read and may edit, is `launch/slurm/job.sh`. It calls `python -m
hybridflow.launch STEP`.
"""
