# The body of every HybridFlow job. `hybridflow slurm render` prepends the #SBATCH lines and the settings; a site may
# use an edited copy (site.yaml: body). It runs on the first node of the allocation:
#
#   preflight   every node checks itself and its connections to the others; spares replace bad nodes, which are named
#   Ray         one srun for all nodes: the first selected node starts the head, the others join
#   ready       wait until every node has joined, with a deadline
#   driver      `hybridflow train`, on the head's node
#   verdict     why the job ended, on the last line of this output; then a requeue, or the job's exit status
#
# Files: $OUT/$SLURM_JOB_ID/restart-N/ contains the logs of all nodes and the driver, merged by `hybridflow slurm logs`.

set -euo pipefail
cd -- "$WORKDIR"
JOB_DIR=$OUT/$SLURM_JOB_ID
RESTART=${SLURM_RESTART_COUNT:-0}
DIR=$JOB_DIR/restart-$RESTART
umask 077 # only this user may read tokens and logs
mkdir -p -- "$DIR"
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # `hybridflow slurm logs 12_3` finds a task by its name
  ln -sfn -- "$SLURM_JOB_ID" "$OUT/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  ln -sfn -- "$SLURM_JOB_ID.out" "$OUT/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"
fi
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$DIR/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$DIR/token RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN RAY_ADDRESS SLURM_CPU_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
umask 022

TRAIN=("${TRAIN[@]//%a/${SLURM_ARRAY_TASK_ID:-}}") # the settings of array tasks differ by %a
RUN_DIR=${RUN_DIR//%a/${SLURM_ARRAY_TASK_ID:-}}

# Names of all nodes of the allocation, including both parts of a heterogeneous job; scontrol expands gaps and prefixes.
HOSTS=()
for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
  list=SLURM_JOB_NODELIST_HET_GROUP_$group
  mapfile -t -O "${#HOSTS[@]}" HOSTS < <(scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}")
done
STEP=(srun "${SRUN[@]}" --overlap --mem=0 --cpu-bind=none --wait=0)
# each NODE ...: set ON to an srun command that runs one task on each of these nodes.
each() {
  if ((${SLURM_HET_SIZE:-1} > 1)); then
    ON=("${STEP[@]}" --ntasks-per-node=1 "--het-group=0-$((SLURM_HET_SIZE - 1))")
  else
    ON=("${STEP[@]}" --ntasks-per-node=1 "--nodes=$#" "--ntasks=$#" "--nodelist=$(IFS=, && echo "$*")")
  fi
}

asked=0 driver='' ray='' step='' driver_status=none why=''
# Slurm is about to reclaim the nodes (USR1: time limit, preemption; TERM): have the driver write a checkpoint and exit.
ask() {
  asked=1
  [[ -z $driver ]] || kill -USR1 "$driver" 2> /dev/null || true
  [[ -n $driver || -z $step ]] || kill -TERM "$step" 2> /dev/null || true
}
trap ask USR1 TERM

# A signal interrupts `wait`, so wait again until the process has exited, and return its status.
ended() {
  local status
  while :; do
    status=0
    wait "$1" || status=$?
    kill -0 "$1" 2> /dev/null || return "$status"
  done
}
# Run in the background, so that signals are handled immediately.
run() {
  "$@" &
  step=$!
  local status=0
  ended "$step" || status=$?
  step=''
  return "$status"
}

# A busy slurmctld occasionally drops a request: try three times.
again() {
  local tries=3
  until "$@"; do
    ((--tries > 0)) || return 1
    sleep 2
  done
}

finish() {
  local status=0
  if [[ -n $driver ]] && kill -0 "$driver" 2> /dev/null; then
    kill -USR2 "$driver" 2> /dev/null || true # end now
  fi
  [[ -z $driver ]] || { driver_status=0 && ended "$driver" || driver_status=$?; }
  [[ -z $ray ]] || kill -USR2 "$ray" 2> /dev/null || true # each node stops Ray and cleans up
  [[ -z $ray ]] || ended "$ray" || true
  # If Slurm lost this node for a while, the job may have been restarted elsewhere. Only the latest attempt is requeued.
  local state='' start=''
  read -r state start < <(again squeue --noheader --Format=State,RestartCnt --jobs "$SLURM_JOB_ID" 2> /dev/null) || true
  [[ ${start:-$RESTART} == "$RESTART" ]] || state=REQUEUED
  "${HERE[@]}" "$PYTHON" -P -m hybridflow.launch verdict --job-dir "$JOB_DIR" --restart "$RESTART" \
    --max-restarts "$MAX_RESTARTS" --run-dir "$RUN_DIR" --state "${state:-UNKNOWN}" --asked "$asked" \
    --driver-status "$driver_status" --why "$why" || status=$?
  rm -f -- "$DIR/token"
  if ((status == 75)); then
    again scontrol requeue "$SLURM_JOB_ID" || echo "hybridflow: Slurm refused the requeue; resubmit the job to resume"
  fi
  exit "$status"
}

if [[ -n $ARCHIVE ]]; then # the environment on each node's own disk
  each "${HOSTS[@]}"
  # shellcheck disable=SC2016 # expanded on the nodes
  run "${ON[@]}" bash -c 'mkdir -p -- "$2" && tar -xf "$1" -C "$2"' - "$ARCHIVE" "$LOCAL" \
    || { why="the environment $ARCHIVE could not be unpacked into $LOCAL on every node"; finish; }
fi

# An unreachable node aborts the step on all other nodes: exclude it, and retry with the rest.
TRY=("${HOSTS[@]}")
: > "$DIR/preflight.err"
while ((${#TRY[@]} > 0)); do
  each "${TRY[@]}"
  run timeout --foreground --kill-after=10 "$PREFLIGHT_TIMEOUT" \
    "${ON[@]}" "${CONTAINER[@]}" "$PYTHON" -P -m hybridflow.launch preflight --dir "$DIR" --hosts "${TRY[*]}" \
    "${PREFLIGHT[@]}" > "$DIR/preflight.out" 2>> "$DIR/preflight.err" || true
  REST=()
  for host in "${TRY[@]}"; do
    grep -qE "launch for .* failed on node $host:" "$DIR/preflight.err" || REST+=("$host")
  done
  ((asked == 0 && ${#REST[@]} < ${#TRY[@]})) || break
  TRY=("${REST[@]}")
done
((asked)) && { why='stopped on request before the driver had started'; finish; }
run "${HERE[@]}" "$PYTHON" -P -m hybridflow.launch judge --dir "$DIR" --hosts "${HOSTS[*]}" --nodes "$NODES" \
  --max-clock-skew "$MAX_CLOCK_SKEW" ${BAD_NODES:+--bad-nodes "${BAD_NODES:-}"} || { why='preflight found too few usable nodes'; finish; }
mapfile -t USE < "$DIR/nodes.txt"

each "${USE[@]}"
"${ON[@]}" --kill-on-bad-exit=1 "${CONTAINER[@]}" \
  "$PYTHON" -P -m hybridflow.launch node --dir "$DIR" "${RAY[@]}" > "$DIR/ray.err" 2>&1 & # each node has its own log
ray=$!

"${STEP[@]}" --nodes=1 --ntasks=1 "--nodelist=${USE[0]}" "${CONTAINER[@]}" \
  "$PYTHON" -P -m hybridflow.launch driver --dir "$DIR" --nodes "$NODES" --start-timeout "$START_TIMEOUT" \
  --grace "$GRACE" -- "${TRAIN[@]}" &
driver=$!
((asked)) && ask

# When either of the two exits, the other one is stopped.
while kill -0 "$ray" 2> /dev/null && kill -0 "$driver" 2> /dev/null; do
  wait -n "$ray" "$driver" || true
done
if ! kill -0 "$driver" 2> /dev/null; then
  driver_status=0
  wait "$driver" || driver_status=$?
  driver=''
fi
finish
