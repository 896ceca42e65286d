-- Creates a hash for a large value. The caller then writes the parts of the value to the hash, one
-- by one. If the caller does not finish, the hash expires.
-- KEYS[1]: the hash. ARGV: HEAD (see records.lua), the length of HEAD and data in bytes, and the ms
-- until the hash expires.
redis.call('HSET', KEYS[1], 'head', ARGV[1], 'length', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
