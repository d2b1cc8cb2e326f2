#!/usr/bin/env bash
# Installs Chromium, in which the tests open the report, unless it is there. Debian and Ubuntu; elsewhere install it by hand.
set -euo pipefail
command -v chromium > /dev/null && exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
$sudo bash "$(dirname "$0")/apt-install.sh" chromium
command -v chromium > /dev/null
