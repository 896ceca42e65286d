#!/bin/sh
# tritonserver that requires the gateway's key for everything except health checks, so that the
# network policy is not the only protection. Give the launcher this file's path:
#   gateway triton launch --tritonserver /launch/tritonserver.sh ...
set -eu
key=$(cat "${TRITON_KEY_FILE:-/run/secrets/triton/key}")
closed=inference,metadata,model-config,model-repository,shared-memory,statistics,trace,logging
exec "${TRITONSERVER:-/opt/tritonserver/bin/tritonserver}" "$@" \
    "--grpc-restricted-protocol=$closed:gateway=$key" "--http-restricted-api=$closed:gateway=$key"
