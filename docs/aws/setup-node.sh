#!/usr/bin/env bash
# Run by ParallelCluster as root when a node starts: Apptainer, from the package that README.md has you put into the bucket.
set -euo pipefail
package=$(mktemp --suffix .deb)
aws s3 cp s3://BUCKET/apptainer.deb "$package"
export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=600 update -qq # the system updates itself when it starts
apt-get -o DPkg::Lock::Timeout=600 install -y -qq "$package"
