#!/usr/bin/env bash
# Installs Chromium, in which the tests open the report, unless it is there. Debian and Ubuntu; elsewhere install it by hand.
set -euo pipefail
command -v chromium > /dev/null && exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq chromium > /dev/null
command -v chromium > /dev/null
