#!/bin/sh
# Generates Redis' password and Triton's key at the first start, in one volume per service that needs
# them. Existing keys are not changed. To change them, remove the volumes `keys-*` and start again.
set -eu
last=/keys/gateway/gateway_triton_metadata
[ -e "$last" ] && exit
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
password=$(random)
key=$(random)
printf '%s' "$password" > /keys/redis/password
printf 'requirepass %s\n' "$password" > /keys/redis/redis.conf
printf '%s' "$key" > /keys/triton/key
# The gateway reads settings from files with these names, see docs/settings.md.
printf 'redis://:%s@redis:6379/0' "$password" > /keys/gateway/gateway_redis_url
printf '{"triton-grpc-protocol-gateway": "%s"}' "$key" > "$last.new"
mv "$last.new" "$last"
