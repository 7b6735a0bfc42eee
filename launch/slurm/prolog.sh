#!/bin/bash
# A node-health check for slurm.conf (Prolog= or HealthCheckProgram=): drains the node when a check of it fails. It
# answers within 30 seconds, also when a disk or a driver hangs. Set PYTHON to the one that has HybridFlow; MIN_FREE_GIB
# and GPUS to what a node of this cluster must have.
set -euo pipefail
PYTHON=${PYTHON:-/opt/hybridflow/.venv/bin/python}
status=0
said=$(timeout --kill-after=2 25 "$PYTHON" -P -m hybridflow.launch health --gpus "${GPUS:-0}" \
  --min-free-gib "${MIN_FREE_GIB:-5}" 2>&1) || status=$?
((status != 0)) || exit 0
((status != 124 && status != 137)) || said="the node's checks did not end within 25 s"
node=${SLURMD_NODENAME:-$(hostname -s)}
timeout 4 scontrol update "NodeName=$node" State=DRAIN "Reason=hybridflow: $(tail -n 1 <<< "$said" | cut -c -200)" || true
echo "$said" >&2
exit 0 # the node is drained; a failing prolog would requeue the job and hold it
