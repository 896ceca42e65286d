-- Times are seconds since 1970. JSON and texts of clients are bytes: PostgreSQL's text and jsonb
-- cannot contain NUL.

-- schema: number of the last migration. readable_from: schema of the oldest release that can use
-- this schema. identity: a random UUID, by which gateways recognise that they use the same database.
-- moved: the state of release 0.1.0 was copied.
CREATE TABLE facts (
    name text PRIMARY KEY,
    value text NOT NULL
);

-- Number of the last change of the rows of each name, and a random text. Processes poll them.
CREATE TABLE changes (
    name text PRIMARY KEY,
    number bigint NOT NULL,
    token text NOT NULL
);

-- Keys that admins have created over the API. Rows are never deleted: a key only ends.
CREATE TABLE api_keys (
    id text PRIMARY KEY,
    hash text NOT NULL,
    tenant text NOT NULL,
    note text NOT NULL,
    created bigint NOT NULL,
    created_by text NOT NULL,
    expires bigint,
    revoked bigint,
    used bigint,
    change bigint NOT NULL
);
CREATE INDEX api_keys_by_change ON api_keys (change);

-- Tokens that tenants have used of their budgets, in the present period of each budget.
CREATE TABLE budget_totals (
    tenant text NOT NULL,
    name text NOT NULL,
    first_day bigint NOT NULL,
    used bigint NOT NULL,
    PRIMARY KEY (tenant, name)
);

-- Weights and drains that admins have set.
CREATE TABLE replica_overrides (
    endpoint text PRIMARY KEY,
    value text NOT NULL
);

-- Actions of admins.
CREATE TABLE audit_log (
    id text PRIMARY KEY,
    at bigint NOT NULL,
    admin text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    outcome text NOT NULL,
    before bytea NOT NULL,
    after bytea NOT NULL
);
CREATE INDEX audit_log_by_time ON audit_log (at, id);
