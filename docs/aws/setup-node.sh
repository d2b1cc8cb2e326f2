#!/usr/bin/env bash
# Run by ParallelCluster as root when a node starts: Apptainer, from the package that README.md has you put into the bucket.
set -euo pipefail
package=$(mktemp --suffix .deb)
aws s3 cp s3://BUCKET/apptainer.deb "$package"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"
