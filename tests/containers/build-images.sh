#!/usr/bin/env bash
# Builds FOLDER/layerproof.sif and FOLDER/neuron.sif by the recipes in containers/, from a Debian root that is made
# here, because a test cannot count on an image registry. In place of the Neuron SDK's image stands one with torch, torch-xla
# and numpy and nothing else of ours. Apptainer would copy each root of 7 GB before it packs it; mksquashfs packs it where
# it is, and Apptainer runs a bare squashfs as well.
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

mmdebstrap --quiet --variant=minbase --include=ca-certificates,git,python3,python3-venv trixie "$folder/debian" \
    "$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -n 1)"
rm -rf "$folder"/debian/dev/* # which a user namespace cannot make
# How this machine reaches its packages.
cp -L /etc/ssl/certs/ca-certificates.crt "$folder/debian/etc/ssl/certs/"
mkdir -p "$folder/debian/etc/uv"
echo 'system-certs = true' > "$folder/debian/etc/uv/uv.toml"

build_and_pack() { # name, folder of the root that it begins with
    build --sandbox --build-arg=BOOTSTRAP=localimage "--build-arg=BASE=$2" "$folder/$1" "containers/$1.def"
    mksquashfs "$folder/$1" "$folder/$1.sif" -comp zstd -Xcompression-level 1 -no-progress -quiet
}
build_and_pack layerproof "$folder/debian"
# What is left is what the SDK's image has, too, but for those libraries for GPUs without which torch cannot be imported.
cd "$folder"/layerproof/opt/layerproof/lib/python3*/site-packages
for package in accelerate h5py jinja2 jsonschema llvmlite matplotlib numba psutil pydantic pydantic_core safetensors snakemake tokenizers transformers; do
    rm -r "$package"{,-[0-9]*}
done
rm -r triton nvidia/{cusolver,cuda_nvrtc,cudnn/lib/libcudnn_*}
cd - > /dev/null
build_and_pack neuron "$folder/layerproof"
rm -r "$folder/debian" "$folder/layerproof" "$folder/neuron"
