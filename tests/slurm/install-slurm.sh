#!/usr/bin/env bash
# Installs Slurm and munge unless they are there. Debian and Ubuntu; elsewhere install them by hand.
set -euo pipefail
command -v slurmctld slurmd munged sbatch > /dev/null && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends munge slurm-client slurm-wlm > /dev/null
