#!/bin/sh
# Lets mpirun on the leader in. A session of sshd would not have the image's paths.
set -eu
exec /usr/sbin/sshd -D -e -f /launch/sshd_config \
    -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
