#!/bin/sh
# Copies the files of the image from an environment to another folder: assemble.sh /opt/venv /image SECONDS
#
# All modules are compiled now, because a read-only root file system prevents it later. All files get
# the same time, so two builds are identical in bytes and times, including /image/opt, whose time the
# image's /opt inherits.
set -eu
dated() {
    find "$1" -exec touch --no-dereference --date="@$2" {} +
}
# A compiled file contains the time of its source. If the time differs, Python compiles again.
dated "$1" "$3"
PYTHONHASHSEED=0 "$1/bin/python" -m compileall -q --invalidation-mode timestamp "$1/lib"
mkdir -p "$2/opt"
mv "$1" "$2/opt"
dated "$2" "$3"
