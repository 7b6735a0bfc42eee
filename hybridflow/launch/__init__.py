"""Starting jobs on a cluster: the sbatch file, what runs on each node of the job, and why a job
ended.

The bash half, which admins read and may edit, is `launch/slurm/job.sh`; it calls `python -m
hybridflow.launch STEP`.
"""
