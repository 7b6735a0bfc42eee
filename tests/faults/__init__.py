"""Runs that are disturbed: processes are killed or stopped, disks fill up, checkpoints are damaged,
at moments drawn by a seed over everything a run does.

A campaign is one small run with a disturbance in its start-up, in every step and at its end.
Whatever becomes of it, the same command is given again until it has finished. Then it is compared
with an undisturbed run of the same shape: the same metrics and final weights to the last bit, each
step once, nothing left behind.

    python -m tests.faults --campaigns 20 --seed 1    play campaigns; outcomes go to runs/faults/trials.jsonl
    python -m tests.faults --table                    write docs/faults.md from all outcomes
    python -m tests.faults.kills                      kill engines, tools, environments and the driver of conversations
    python -m tests.faults.kills --table              write docs/kills.md from all outcomes
"""
