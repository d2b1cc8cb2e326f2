#!/bin/sh
# Prints the path of the Python to set up with: 3.12 or 3.13.
# pyenv's commands answer to PYENV_VERSION alone, unless their version is the global one.
usable='import ctypes, ensurepip, sys
assert (3, 12) <= sys.version_info < (3, 14)
ctypes.CDLL("libpython%d.%d.so.1.0" % sys.version_info[:2])  # which torch-xla loads
print(sys.executable)'

for version in 3.12 3.13 3; do
    PYENV_VERSION=$version "python$version" -c "$usable" 2>/dev/null && exit
done
echo "Layerproof needs Python 3.12 or 3.13 with venv and its shared library. On Debian 13 and Ubuntu 24.04: apt-get install python3-venv libpython3-dev" >&2
exit 1
