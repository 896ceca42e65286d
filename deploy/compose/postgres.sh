#!/bin/sh
# Starts PostgreSQL of the official image with the role `gateway`, which owns the database and is no
# superuser. The role gets its password at each start, so that it follows the volume `keys-postgres`.
#
# The superuser `postgres` has no password and can connect only from this container:
#   docker compose exec postgres psql --username postgres
set -eu
# The image asks for the superuser's password. Nothing needs it, and it is removed below.
POSTGRES_PASSWORD=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export POSTGRES_PASSWORD
docker-ensure-initdb.sh
unset POSTGRES_PASSWORD
# The server of one session, without a port. Its log must not quote the password.
postgres --single -j -D "$PGDATA" -c exit_on_error=on -c log_min_error_statement=panic postgres \
    > /dev/null << 'SQL'
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gateway') THEN
        CREATE ROLE gateway LOGIN;
    END IF;
    EXECUTE format('ALTER ROLE gateway PASSWORD %L', pg_read_file('/run/secrets/password'));
    ALTER ROLE postgres PASSWORD NULL;
    ALTER DATABASE gateway OWNER TO gateway;
END
$$;

SQL
exec docker-entrypoint.sh postgres
