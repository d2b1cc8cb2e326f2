#!/usr/bin/env bash
# Builds FOLDER/layerproof.sif and FOLDER/neuron.sif by the recipes in containers/, from a Debian root that is made here, because a
# test cannot count on an image registry. In place of the Neuron SDK's image stands one
# with torch, torch-xla and numpy and nothing else of ours.
# Usage: build-images.sh FOLDER    (as root, with Apptainer on PATH)
set -euo pipefail
folder=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
cd "$here/../.."

# Where root has less than all capabilities, Apptainer builds in a user namespace in which it has them.
build() {
    local go
    go=$(mktemp -u)
    mkfifo "$go"
    unshare --user --mount bash -c 'read -r < "$0"; exec "$@"' "$go" apptainer --quiet build --force "$@" &
    local process=$!
    until [ "$(readlink "/proc/$process/ns/user")" != "$(readlink /proc/self/ns/user)" ]; do sleep 0.1; done
    echo "0 0 65536" > "/proc/$process/uid_map"
    echo "0 0 65536" > "/proc/$process/gid_map"
    echo > "$go"
    rm "$go"
    wait "$process"
}

debootstrap --variant=minbase --include=ca-certificates,git,python3,python3-venv trixie "$folder/debian" \
    "$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -n 1)" > "$folder/debootstrap.log"
rm -rf "$folder"/debian/dev/* # which a user namespace cannot make
# How this machine reaches its packages.
cp -L /etc/ssl/certs/ca-certificates.crt "$folder/debian/etc/ssl/certs/"
mkdir -p "$folder/debian/etc/uv"
echo 'system-certs = true' > "$folder/debian/etc/uv/uv.toml"

base() { echo "--build-arg=BOOTSTRAP=localimage --build-arg=BASE=$1"; }
squash="-comp zstd -Xcompression-level 1"
# shellcheck disable=SC2046
build --sandbox $(base "$folder/debian") "$folder/root" containers/layerproof.def
build --mksquashfs-args "$squash" "$folder/layerproof.sif" "$folder/root"
# What is left is what the SDK's image has, too.
for package in accelerate h5py jinja2 jsonschema llvmlite matplotlib numba psutil pydantic pydantic_core safetensors snakemake tokenizers transformers; do
    rm -r "$folder"/root/opt/layerproof/lib/python3*/site-packages/"$package"{,-[0-9]*}
done
# shellcheck disable=SC2046
build --mksquashfs-args "$squash" $(base "$folder/root") "$folder/neuron.sif" containers/neuron.def
rm -r "$folder/debian" "$folder/root"
