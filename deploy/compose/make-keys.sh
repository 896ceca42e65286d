#!/bin/sh
# Generates the passwords of Redis and PostgreSQL and Triton's key at the first start, in one volume
# per service that needs them. Existing keys are not changed. To change them, remove the volumes
# `keys-*` and start again.
set -eu
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
# The gateway reads settings from files with these names, see docs/settings.md. The last file of each
# service is renamed, so that an interrupted start generates the service's keys again.
last=/keys/gateway/gateway_triton_metadata
if [ ! -e "$last" ]; then
    password=$(random)
    key=$(random)
    printf '%s' "$password" > /keys/redis/password
    printf 'requirepass %s\n' "$password" > /keys/redis/redis.conf
    printf '%s' "$key" > /keys/triton/key
    printf 'redis://:%s@redis:6379/0' "$password" > /keys/gateway/gateway_redis_url
    printf '{"triton-grpc-protocol-gateway": "%s"}' "$key" > "$last.new"
    mv "$last.new" "$last"
fi
last=/keys/gateway/gateway_database_url
if [ ! -e "$last" ] || [ ! -e /keys/postgres/password ]; then
    password=$(random)
    printf '%s' "$password" > /keys/postgres/password
    printf 'postgresql://gateway:%s@postgres:5432/gateway' "$password" > "$last.new"
    mv "$last.new" "$last"
fi
