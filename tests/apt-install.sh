#!/usr/bin/env bash
# Installs Debian packages. Calls of it wait for each other, as apt-get does not: tests that need packages begin side by side.
# Usage: apt-install.sh [OPTION...] PACKAGE...    (as root)
set -euo pipefail
one_at_a_time() { flock --close /var/lock/layerproof-apt "$@"; }
one_at_a_time apt-get update -qq
DEBIAN_FRONTEND=noninteractive one_at_a_time apt-get install -y -qq "$@" > /dev/null
