-- Begins a large value, whose parts are written one by one; what is not finished expires.
-- KEYS: the hash. ARGV: HEAD, bytes of HEAD and data, ms that it lives.
redis.call('HSET', KEYS[1], 'head', ARGV[1], 'length', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
