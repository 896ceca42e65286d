#!/bin/sh
# tritonserver with everything but health closed to whoever lacks the key that the gateway has, so
# that the network's policy is not the only wall. The launcher takes this file's path:
#   gateway triton launch --tritonserver /launch/tritonserver.sh ...
set -eu
key=$(cat "${TRITON_KEY_FILE:-/run/secrets/triton/key}")
closed=inference,metadata,model-config,model-repository,shared-memory,statistics,trace,logging
exec "${TRITONSERVER:-/opt/tritonserver/bin/tritonserver}" "$@" \
    "--grpc-restricted-protocol=$closed:gateway=$key" "--http-restricted-api=$closed:gateway=$key"
