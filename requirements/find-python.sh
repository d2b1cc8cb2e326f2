#!/bin/sh
# Prints the path of the Python to set up with: 3.12 or 3.13, where recording what jobs run is nearly free, or else 3.11.
# pyenv's commands answer to PYENV_VERSION alone, unless their version is the global one.
usable='import ctypes, ensurepip, sys
assert (3, 11) <= sys.version_info < (3, 14)
ctypes.CDLL("libpython%d.%d.so.1.0" % sys.version_info[:2])  # which torch-xla loads
print(sys.executable)'

for version in 3.12 3.13 3.11 3; do
    PYENV_VERSION=$version "python$version" -c "$usable" 2>/dev/null && exit
done
echo "No Python from 3.11 to 3.13 with venv and its shared library. On Debian and Ubuntu: apt-get install python3-venv libpython3-dev" >&2
exit 1
