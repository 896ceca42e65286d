-- Says that a tenant has new notices of deletions.
-- KEYS: a sorted set, tenants by when they had new ones last, in us since 1970, each time another.
-- ARGV: the tenant, for how many us tenants are listed.
local clock = redis.call('TIME')
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local now = math.max(clock[1] * 1000000 + clock[2], (tonumber(last[2] or nil) or 0) + 1)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - tonumber(ARGV[2])))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ARGV[2] / 1000))
