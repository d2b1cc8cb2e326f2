#!/usr/bin/env bash
# Installs Slurm and munge unless they are there. Debian and Ubuntu; elsewhere install them by hand.
set -euo pipefail
command -v slurmctld slurmd munged sbatch > /dev/null && exit 0
bash "$(dirname "$0")/../apt-install.sh" --no-install-recommends munge slurm-client slurm-wlm
