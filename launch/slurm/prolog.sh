#!/bin/bash
# A node health check for slurm.conf (Prolog= or HealthCheckProgram=). It drains the node if a check fails, and finishes
# within 30 seconds even if a disk or a driver hangs. Set PYTHON to a Python with HybridFlow installed, and MIN_FREE_GIB
# and GPUS to the requirements for a node of this cluster.
set -euo pipefail
PYTHON=${PYTHON:-/opt/hybridflow/.venv/bin/python}
status=0
said=$(timeout --kill-after=2 25 "$PYTHON" -P -m hybridflow.launch health --gpus "${GPUS:-0}" \
  --min-free-gib "${MIN_FREE_GIB:-5}" 2>&1) || status=$?
((status != 0)) || exit 0
((status != 124 && status != 137)) || said="the node's checks did not finish within 25 s"
node=${SLURMD_NODENAME:-$(hostname -s)}
timeout 4 scontrol update "NodeName=$node" State=DRAIN "Reason=hybridflow: $(tail -n 1 <<< "$said" | cut -c -200)" || true
echo "$said" >&2
exit 0 # the node is drained; a failing prolog would requeue the job and hold it
