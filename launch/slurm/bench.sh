# The body of a benchmark job. `hybridflow slurm render --bench SUITE --nodes N` prepends the #SBATCH lines and the
# settings. One task per node runs the suite, all at the same time and into one folder; then the first node merges
# their results. The last line names outlier nodes; the exit status is 1 if there is one.

set -euo pipefail
cd -- "$WORKDIR"
DIR=$OUT/$SLURM_JOB_ID
mkdir -p -- "$DIR"
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

status=0
# shellcheck disable=SC2016 # expanded on the nodes
srun "${SRUN[@]}" --ntasks-per-node=1 --mem=0 --cpu-bind=none --wait=0 "${CONTAINER[@]}" bash -c \
  'exec "$1" -P -m hybridflow.cli.main "${@:3}" --out "$2" --node "$SLURMD_NODENAME"' - "$PYTHON" "$DIR" "${TRAIN[@]}" \
  --nodes "${HOSTS[@]}" || echo "hybridflow: the suite exited with status $? on a node; see the report for the results"
"${HERE[@]}" "$PYTHON" -P -m hybridflow.cli.main bench report "$DIR" --format html --out "$DIR/report.html"
said=$("${HERE[@]}" "$PYTHON" -P -m hybridflow.cli.main bench report "$DIR" --strict) || status=$?
echo "$said"
[[ -z ${DRAIN:-} ]] || while read -r _ node _ _ why; do
  scontrol update "NodeName=$node" State=DRAIN "Reason=hybridflow: ${why:0:200}" && echo "drained $node" || status=1
done < <(grep -E '^node [^ ]+ stands out: ' <<< "$said" | sort -u -k 2,2)
exit "$status"
