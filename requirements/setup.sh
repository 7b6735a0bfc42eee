#!/usr/bin/env bash
# Bring .venv to what the lock files say: requirements/setup.sh LANE [dev]
# Does nothing when it is there already. An interrupted run is simply repeated: the stamp is written last.
set -euo pipefail
cd "$(dirname "$0")/.."

lane=${1:?usage: requirements/setup.sh cpu|gpu [dev]}
dev=${2:-}
[[ -f requirements/$lane.txt ]] || { echo "setup: no lane named $lane; choose cpu or gpu" >&2; exit 2; }

venv=.venv
stamp=$venv/.hybridflow-setup
lane_file=$venv/.hybridflow-lane  # apart from the stamp, so that an interrupted setup of another lane is still seen as such
locks=("requirements/build.txt" "requirements/$lane.txt")
[[ $lane == cpu ]] && locks+=("requirements/torch-cpu.txt")
wanted="$lane $(cat "${locks[@]}" setup.py "$0" | sha256sum | cut -c1-64)"
next=requirements/megatron-0.19.txt  # the gpu lane's Megatron, for the tests of the cpu lane
trackers=requirements/trackers.txt  # libraries of wandb, mlflow and trackio, for their tests
wanted_dev="$lane $(cat "${locks[@]}" requirements/dev.txt "$next" "$trackers" setup.py "$0" | sha256sum | cut -c1-64)"

# Transformer Engine is compiled against the installed torch, where there is a compiler. Its wheels are kept in wheels/.
engine=requirements/transformer-engine.txt
wanted_engine="$wanted $(sha256sum < "$engine")"
compiler() { [[ -x ${CUDA_HOME:-/nowhere}/bin/nvcc ]] || command -v nvcc >/dev/null; }
lacks_engine() { [[ $lane == gpu ]] && compiler && ! holds "$stamp-engine" "$wanted_engine"; }

holds() { [[ -x $venv/bin/python && -f $1 && $(<"$1") == "$2" ]]; }
if holds "$stamp" "$wanted" && { [[ -z $dev ]] || holds "$stamp-dev" "$wanted_dev"; } && ! lacks_engine; then exit 0; fi

# Exactly this one: the lane's lock was resolved for it, and only the cpu lane's torch decides for 3.11 (docs/adr/0055).
version=3.11
[[ $lane == gpu ]] && version=3.12
find_python() {
  for candidate in ${PYTHON:-} "python$version" python3; do
    if [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$version" ]]; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: the $lane lane needs Python $version with venv; give its path as PYTHON=..." >&2
  return 1
}
step() { printf 'setup [%3d s] %s\n' "$SECONDS" "$1"; }
install() { "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check --no-deps --no-build-isolation "$@"; }

# The same lock by uv, where it is on the path (UV=no leaves it aside). It does not read pip's configuration: what it does
# not find is left to pip, and a CPU build of torch that only pip is told of is installed before, by pip.
install_lock() {
  if command -v "${UV:-uv}" >/dev/null; then
    "${UV:-uv}" pip install -q --python "$venv/bin/python" --no-deps --no-build-isolation --compile-bytecode -r "$1" && return
    echo "setup: uv could not install $1; pip does it" >&2
  fi
  install -r "$1"
}

fresh() {
  local python; python=$(find_python)
  step "creating $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  echo "$lane" > "$lane_file"
}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  fresh
elif [[ -f $lane_file && $(<"$lane_file") != "$lane" ]]; then
  step "$venv holds the $(<"$lane_file") lane; starting over for $lane"
  fresh
elif [[ -f $venv/pyvenv.cfg ]] && ! grep -q "^version = $version\." "$venv/pyvenv.cfg"; then
  step "$venv has another Python than $version; starting over"
  fresh
fi
echo "$lane" > "$lane_file"

if ! holds "$stamp" "$wanted"; then
  rm -f "$stamp" "$stamp-dev"
  step "build tools"
  install -r requirements/build.txt
  if [[ $lane == cpu ]]; then
    step "torch, the CPU build, alone"
    install -r requirements/torch-cpu.txt
    "$venv/bin/python" requirements/verify.py cpu requirements/torch-cpu.txt
  fi
  step "$(grep -c '==' "requirements/$lane.txt") packages of the $lane lane (a few minutes)"
  install_lock "requirements/$lane.txt"
  step "hybridflow itself"
  install -e .
  step "verifying"
  "$venv/bin/python" requirements/verify.py "$lane" "${locks[@]}"
  echo "$wanted" > "$stamp"
fi
if lacks_engine; then
  step "Transformer Engine, compiled against this torch (10 minutes, once)"
  wheels=wheels/$(cat "$engine" "requirements/$lane.txt" | sha256sum | cut -c1-12)  # of this torch
  if { compgen -G "$wheels/transformer_engine_torch-*.whl" >/dev/null || "$venv/bin/python" -m pip wheel -qq --no-input \
      --disable-pip-version-check --no-deps --no-build-isolation -w "$wheels" -r "$engine"; } && install "$wheels"/*.whl; then
    echo "$wanted_engine" > "$stamp-engine"
  else
    echo "setup: Transformer Engine could not be built; a run on GPUs works without it, slower, and says so at its start." \
      "The next setup tries again." >&2
  fi
fi
if [[ -n $dev ]] && ! holds "$stamp-dev" "$wanted_dev"; then
  step "development tools"
  install_lock requirements/dev.txt
  rm -rf "$venv/trackers"
  install --target "$venv/trackers" -r "$trackers"
  if [[ $lane == cpu ]]; then
    rm -rf "$venv/megatron-0.19"
    install --target "$venv/megatron-0.19" --python-version 3.12 --ignore-requires-python --only-binary=:all: -r "$next"
  fi
  "$venv/bin/python" requirements/verify.py "$lane" "${locks[@]}" requirements/dev.txt
  echo "$wanted_dev" > "$stamp-dev"
fi
step "ready"
