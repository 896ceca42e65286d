#!/bin/sh
# Makes of an environment what the image has, below another folder: assemble.sh /opt/venv /image SECONDS
#
# All modules are compiled, as nothing can be later where the root file system is read-only. All has
# one time, and what is made twice is the same: bytes and times, those of /image/opt included, which
# the image's /opt takes over.
set -eu
dated() {
    find "$1" -exec touch --no-dereference --date="@$2" {} +
}
# What is compiled has its source's time in it, and Python compiles again when that changes.
dated "$1" "$3"
PYTHONHASHSEED=0 "$1/bin/python" -m compileall -q --invalidation-mode timestamp "$1/lib"
mkdir -p "$2/opt"
mv "$1" "$2/opt"
dated "$2" "$3"
