#!/bin/bash
# The parts of the official image's docker-entrypoint.sh and docker-ensure-initdb.sh that
# docker-compose.yml uses. The latter is a link to this file.
set -eu
mkdir --parents "$PGDATA"
chmod 700 "$PGDATA"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    for folder in /var/lib/postgresql/*/docker; do
        if [ -s "$folder/PG_VERSION" ]; then
            echo "Error: there appears to be PostgreSQL data of another release in $folder" >&2
            exit 1
        fi
    done
    # POSTGRES_INITDB_ARGS has several arguments.
    # shellcheck disable=SC2086
    initdb --username=postgres --pwfile=<(echo "$POSTGRES_PASSWORD") $POSTGRES_INITDB_ARGS
    echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >> "$PGDATA/postgresql.conf"
    # The socket alone until the database is complete.
    pg_ctl --wait --options="-c listen_addresses=''" start
    createdb --username=postgres "$POSTGRES_DB"
    pg_ctl --wait --mode=fast stop
fi
[ "${0##*/}" = docker-ensure-initdb.sh ] || exec "$@"
