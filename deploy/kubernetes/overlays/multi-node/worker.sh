#!/bin/sh
# Runs sshd for mpirun on the leader. A session of sshd does not have the image's paths by default.
set -eu
exec /usr/sbin/sshd -D -e -f /launch/sshd_config \
    -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
