#!/usr/bin/env bash
# Installs Debian packages that are not there. Calls of it wait for each other, as apt-get does not: tests that need packages
# begin side by side.
# Usage: apt-install.sh [OPTION...] PACKAGE...    (as root)
set -euo pipefail
packages=()
for word in "$@"; do
    [[ $word == -* ]] || packages+=("$word")
done
there=$(dpkg-query --show --showformat='${Status}\n' "${packages[@]}" 2> /dev/null | grep -c '^install ok installed$' || true)
[ "$there" = "${#packages[@]}" ] && exit 0

export DEBIAN_FRONTEND=noninteractive
one_at_a_time() { flock --close /var/lock/layerproof-apt "$@"; }
# With the lists of packages as they are; if they are old or missing, with new ones.
one_at_a_time apt-get install -y -qq "$@" > /dev/null 2>&1 && exit 0
one_at_a_time apt-get update -qq
one_at_a_time apt-get install -y -qq "$@" > /dev/null
