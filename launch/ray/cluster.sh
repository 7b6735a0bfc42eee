#!/usr/bin/env bash
# Starts a Ray cluster without a scheduler. Run it on each machine, starting with the head.
#
#   head:     launch/ray/cluster.sh head  10.0.0.1
#   others:   launch/ray/cluster.sh join  10.0.0.1 10.0.0.2     (the head's address, then this machine's)
#   train:    hybridflow train --config-name NAME cluster.address=10.0.0.1:20000 cluster.nodes=2
#   or:       RAY_API_SERVER_ADDRESS=http://127.0.0.1:20008 ray job submit --working-dir . -- hybridflow train ...
#   stop:     launch/ray/cluster.sh stop                        (on each machine; your other clusters keep running)
#
# All machines need the same token. Create it once, copy it to each machine, and keep it private:
#   (umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > ~/.hybridflow-ray-token)
# Ray's folder, including its sockets and logs, is inside a folder that only this user can enter; `stop` removes it.
# `ray job submit` needs the packages of requirements/ray-jobs.txt on the head. The dashboard listens on loopback.
set -euo pipefail

action=${1:?usage: cluster.sh head ADDRESS | join HEAD ADDRESS | stop}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.hybridflow-ray-token}
export RAY_USAGE_STATS_ENABLED=0
PYTHON=${PYTHON:-python3} # with HybridFlow and Ray installed
unset RAY_AUTH_TOKEN RAY_ADDRESS RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
FIRST_PORT=${FIRST_PORT:-20000} # below the ephemeral ports; must differ for a second cluster on the same machines
if [[ $action != stop && ! -s $RAY_AUTH_TOKEN_PATH ]]; then
  echo "cluster.sh: $RAY_AUTH_TOKEN_PATH is missing or empty; create the token once and copy it to every machine" >&2
  exit 2
fi

folder='' # Ray's own default, /tmp/ray, is open to every user of the machine
if [[ $action == head || $action == join ]]; then
  folder=$("$PYTHON" -P -m hybridflow.launch private-folder --prefix "hf-cluster-$FIRST_PORT-") || {
    echo "cluster.sh: could not create a private folder for Ray; set PYTHON to a Python with HybridFlow installed" >&2
    exit 2
  }
fi

# With a loopback address, Ray would use the address of another interface, and listen on all of them.
[[ ${2:-} != 127.0.0.1 ]] || export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0

services=(
  "--temp-dir=$folder"
  "--node-manager-port=$((FIRST_PORT + 1))" "--object-manager-port=$((FIRST_PORT + 2))"
  "--dashboard-agent-grpc-port=$((FIRST_PORT + 3))" "--dashboard-agent-listen-port=$((FIRST_PORT + 4))"
  "--runtime-env-agent-port=$((FIRST_PORT + 5))" "--metrics-export-port=$((FIRST_PORT + 6))"
  --min-worker-port=0 --max-worker-port=0 --disable-usage-stats
)
case $action in
  head)
    ray start --head "--node-ip-address=${2:?the address of this machine}" "--port=$FIRST_PORT" \
      "--ray-client-server-port=$((FIRST_PORT + 7))" "--dashboard-port=$((FIRST_PORT + 8))" "${services[@]}" \
      --system-config='{"enable_worker_prestart": false, "prestart_worker_first_driver": false, "kill_child_processes_on_worker_exit": false}'
    ;;
  join)
    ray start "--address=${2:?the address of the head}:$FIRST_PORT" \
      "--node-ip-address=${3:?the address of this machine}" "${services[@]}"
    ;;
  stop)
    # `ray stop` would end all of this user's Ray processes on the machine, including those of running jobs
    mine="(--gcs_server_port=|--(gcs-)?address=[^ ]*:)$FIRST_PORT( |\$)"
    for signal in TERM KILL; do
      pkill "-$signal" -u "$(id -u)" -f -- "$mine" || break
      for _ in {1..50}; do
        pgrep -u "$(id -u)" -f -- "$mine" > /dev/null || break 2
        sleep 0.2
      done
    done
    if ! pgrep -u "$(id -u)" -f -- "$mine" > /dev/null; then
      # not `find`, which fails if another process removes its own folder meanwhile
      for folder in /tmp/hf-cluster-"$FIRST_PORT"-* "${TMPDIR:-/tmp}"/hf-cluster-"$FIRST_PORT"-*; do
        if [[ -O $folder && ! -L $folder ]]; then rm -rf -- "$folder"; fi
      done
      exit 0
    fi
    echo "cluster.sh: processes of the cluster at port $FIRST_PORT did not exit: $(pgrep -u "$(id -u)" -f -- "$mine" | xargs)" >&2
    exit 1
    ;;
  *)
    echo "cluster.sh: unknown action $action; use head, join or stop" >&2
    exit 2
    ;;
esac
