-- Announces to all gateways that a tenant has new notices of deleted records.
-- KEYS[1]: sorted set of tenants. The score is the time of the tenant's last announcement, in us
--   since 1970. Each announcement gets a higher score than all earlier announcements.
-- ARGV: the tenant's name, and the us after which a tenant is removed from the set.
local clock = redis.call('TIME')
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local now = math.max(clock[1] * 1000000 + clock[2], (tonumber(last[2] or nil) or 0) + 1)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - tonumber(ARGV[2])))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ARGV[2] / 1000))
