#!/usr/bin/env bash
# Installs Apptainer 1.4 into PREFIX/usr/bin unless it is there. Debian 12 has none: this takes sid's package and trixie's libc
# beside it, and replaces nothing of the system. Elsewhere install it by hand.
# Usage: install-apptainer.sh PREFIX    (as root)
set -euo pipefail
prefix=$1
[ -x "$prefix/done" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$prefix"/glibc
bash "$(dirname "$0")/../apt-install.sh" --no-install-recommends mmdebstrap libseccomp2 libsqlite3-0 patchelf squashfs-tools
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -n 1)

fetch() { # suite package
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $1 main" > "$work/source"
    local options=(-qq -o Dir::Etc::sourcelist="$work/source" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
    cd "$work"
    apt-get "${options[@]}" update
    apt-get "${options[@]}" download "$2"
    dpkg-deb -x "$2"_*.deb "$work/$2"
}
fetch sid apptainer
fetch trixie libc6

cp -a "$work"/libc6/usr/lib/x86_64-linux-gnu/*.so* "$prefix"/glibc/
cp -a "$work"/apptainer/usr "$prefix"/
cp -a "$work"/apptainer/etc "$prefix"/usr/
for file in bin/apptainer lib/x86_64-linux-gnu/apptainer/bin/starter; do
    patchelf --set-interpreter "$prefix"/glibc/ld-linux-x86-64.so.2 --force-rpath \
        --set-rpath "$prefix"/glibc:/usr/lib/x86_64-linux-gnu "$prefix/usr/$file"
done
mkdir -p "$prefix"/usr/{lib/,}var/lib/apptainer/mnt/session
# For hosts whose root lacks CAP_SYS_RESOURCE; and so that containers of one image share what the kernel has read of it.
sed -i -e 's/^root default capabilities.*/root default capabilities = no/' -e 's/^shared loop devices.*/shared loop devices = yes/' \
    "$prefix"/usr/etc/apptainer/apptainer.conf
"$prefix"/usr/bin/apptainer --version
install -m 755 /dev/null "$prefix/done"
