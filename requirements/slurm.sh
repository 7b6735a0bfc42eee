#!/usr/bin/env bash
# Installs Debian's Slurm for tests/slurm, where that is possible: root, apt-get, and a package index that answers.
# Does nothing where Slurm is installed already, or with SLURM=no. The tests are left out where it is missing, and the
# last line of a test run says so. No daemon of the system is configured or started: the tests start their own.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
installed=yes
for program in slurmctld slurmd munged; do command -v "$program" > /dev/null || installed=no; done
if [[ ${SLURM:-} == no || $installed == yes ]]; then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "setup: Slurm is not installed, and only root can install it with apt-get: tests/slurm is left out"
  exit 0
fi
echo "setup: installing slurm-wlm, munge and shellcheck with apt-get for tests/slurm (SLURM=no leaves them out)"
log=$(mktemp)
if ! { timeout 60 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 240 \
  apt-get install -y --no-install-recommends slurm-wlm munge shellcheck; } > "$log" 2>&1 < /dev/null; then
  tail -n 3 "$log"
  echo "setup: Slurm could not be installed: tests/slurm is left out"
fi
rm -f -- "$log"
