# The body of every HybridFlow job. `hybridflow slurm render` puts the #SBATCH lines and the settings before it; a site
# may keep an edited copy (site.yaml: body). It runs on the first node of the allocation:
#
#   preflight   every node checks itself and reaches every other; bad nodes are named, spares take their place
#   Ray         one srun for all nodes: the first node that is used starts the head, the others join
#   ready       until every node has joined, or a deadline
#   driver      `hybridflow train`, on the head's node
#   verdict     why it ended, on the last line of this output; requeue, or the exit status of the job
#
# Files: $OUT/$SLURM_JOB_ID/restart-N/ has a log of each node and of the driver. `hybridflow slurm logs` joins them.

set -euo pipefail
cd -- "$WORKDIR"
JOB_DIR=$OUT/$SLURM_JOB_ID
RESTART=${SLURM_RESTART_COUNT:-0}
DIR=$JOB_DIR/restart-$RESTART
umask 077 # only the user reads tokens and logs
mkdir -p -- "$DIR"
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$DIR/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$DIR/token RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN RAY_ADDRESS SLURM_CPU_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
umask 022

TRAIN=("${TRAIN[@]//%a/${SLURM_ARRAY_TASK_ID:-}}") # an array's tasks differ by %a in their settings
RUN_DIR=${RUN_DIR//%a/${SLURM_ARRAY_TASK_ID:-}}

# Every node of the allocation by name, also of a heterogeneous job; scontrol knows gaps and several prefixes.
HOSTS=()
for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
  list=SLURM_JOB_NODELIST_HET_GROUP_$group
  mapfile -t -O "${#HOSTS[@]}" HOSTS < <(scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}")
done
EACH=(srun "${SRUN[@]}" --overlap --mem=0 --cpu-bind=none --wait=0 --ntasks-per-node=1)
if ((${SLURM_HET_SIZE:-1} > 1)); then
  EACH+=("--het-group=0-$((SLURM_HET_SIZE - 1))")
else
  EACH+=("--nodes=${#HOSTS[@]}" "--ntasks=${#HOSTS[@]}")
fi
ONE=(srun "${SRUN[@]}" --overlap --mem=0 --cpu-bind=none --wait=0 --nodes=1 --ntasks=1)

asked=0 driver='' ray='' step='' driver_status=none why=''
# Slurm is about to take the nodes (USR1: time limit, preemption; TERM): the driver writes a checkpoint and ends.
ask() {
  asked=1
  [[ -z $driver ]] || kill -USR1 "$driver" 2> /dev/null || true
  [[ -n $driver || -z $step ]] || kill -TERM "$step" 2> /dev/null || true
}
trap ask USR1 TERM

# A signal interrupts `wait`: wait again until the process has ended, and return its status.
ended() {
  local status
  while :; do
    status=0
    wait "$1" || status=$?
    kill -0 "$1" 2> /dev/null || return "$status"
  done
}
# In the background, so that a signal is heard at once.
run() {
  "$@" &
  step=$!
  local status=0
  ended "$step" || status=$?
  step=''
  return "$status"
}

finish() {
  local status=0
  if [[ -n $driver ]] && kill -0 "$driver" 2> /dev/null; then
    kill -USR2 "$driver" 2> /dev/null || true # end now
  fi
  [[ -z $driver ]] || { driver_status=0 && ended "$driver" || driver_status=$?; }
  [[ -z $ray ]] || kill -USR2 "$ray" 2> /dev/null || true # USR2 has each node stop Ray and clear up
  [[ -z $ray ]] || ended "$ray" || true
  local state
  state=$(squeue --noheader --format=%T --jobs "$SLURM_JOB_ID" 2> /dev/null || true)
  "${HERE[@]}" "$PYTHON" -m hybridflow.launch verdict --job-dir "$JOB_DIR" --restart "$RESTART" \
    --max-restarts "$MAX_RESTARTS" --run-dir "$RUN_DIR" --state "$state" --asked "$asked" \
    --driver-status "$driver_status" --why "$why" || status=$?
  rm -f -- "$DIR/token"
  if ((status == 75)); then
    scontrol requeue "$SLURM_JOB_ID" || echo "hybridflow: Slurm does not requeue this job; submit it again to go on"
  fi
  exit "$status"
}

if [[ -n $ARCHIVE ]]; then # the environment on each node's own disk
  # shellcheck disable=SC2016 # the nodes expand it
  run "${EACH[@]}" bash -c 'mkdir -p -- "$2" && tar -xf "$1" -C "$2"' - "$ARCHIVE" "$LOCAL" \
    || { why="the environment $ARCHIVE could not be unpacked into $LOCAL on every node"; finish; }
fi

run timeout --foreground --kill-after=10 "$PREFLIGHT_TIMEOUT" \
  "${EACH[@]}" "${CONTAINER[@]}" "$PYTHON" -m hybridflow.launch preflight --dir "$DIR" --hosts "${HOSTS[*]}" \
  "${PREFLIGHT[@]}" > "$DIR/preflight.out" 2> "$DIR/preflight.err" || true
((asked)) && { why='it was asked to stop before the driver had started'; finish; }
run "${HERE[@]}" "$PYTHON" -m hybridflow.launch judge --dir "$DIR" --hosts "${HOSTS[*]}" --nodes "$NODES" \
  --max-clock-skew "$MAX_CLOCK_SKEW" || { why='preflight found too few good nodes'; finish; }
HEAD=$(< "$DIR/head-node")

"${EACH[@]}" --kill-on-bad-exit=1 "${CONTAINER[@]}" \
  "$PYTHON" -m hybridflow.launch node --dir "$DIR" "${RAY[@]}" > "$DIR/ray.err" 2>&1 & # each node has a log of its own
ray=$!

"${ONE[@]}" "--nodelist=$HEAD" "${CONTAINER[@]}" \
  "$PYTHON" -m hybridflow.launch driver --dir "$DIR" --nodes "$NODES" --start-timeout "$START_TIMEOUT" \
  --grace "$GRACE" -- "${TRAIN[@]}" &
driver=$!
((asked)) && ask

# The first of the two to end decides; the other one is stopped.
while kill -0 "$ray" 2> /dev/null && kill -0 "$driver" 2> /dev/null; do
  wait -n "$ray" "$driver" || true
done
if ! kill -0 "$driver" 2> /dev/null; then
  driver_status=0
  wait "$driver" || driver_status=$?
  driver=''
fi
finish
