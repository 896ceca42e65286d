-- Usage of requests, as in the usage log. Days are counted from 1970, in UTC; a tenant without a
-- name is "". Gateways create a partition for each day.
CREATE TABLE usage_records (
    day bigint NOT NULL,
    tenant text NOT NULL,
    id text NOT NULL,
    request_id text NOT NULL,
    model text NOT NULL,
    adapter text,
    adapter_version text,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    status bigint NOT NULL,
    finish text NOT NULL,
    started double precision NOT NULL,
    ended double precision NOT NULL,
    PRIMARY KEY (day, tenant, id)
) PARTITION BY RANGE (day);
