-- Common first part of the scripts that access the records of one tenant (put.lua, read.lua and
-- renew.lua). A unit is a group with its head record (the record whose id is the group's id), or a
-- single record without a group. The records of a unit are renewed, expire and are evicted
-- together.
-- KEYS[1] is the prefix of all keys of the tenant. All keys have the same hash tag. After the
-- prefix, their names are:
--   r:ID     string: a record, which consists of HEAD and data. HEAD contains the epoch in which
--            a client's request stored the record; 0 if a gateway has uploaded the record from its
--            disk. Expires. A large record is a hash instead: field `head` is HEAD, field `length`
--            is the length of HEAD and data in bytes, and the fields 0, 1, ... are parts of HEAD
--            and data.
--   g:GROUP  sorted set of ORDER:ID of the group's members. All scores are 0, so that Redis sorts
--            the members by ORDER. Expires.
--   s:TOKEN  a large value that put.lua will rename to the key of a record; expires within a minute
--   used     sorted set: units, by the time at which they were last used
--   sizes    hash: bytes by unit; the field @ is the sum
--   gone     stream: ids of deleted records (field i) and of evicted groups (field u); expires
-- ARGV[1] is the time to live of a unit in ms. ARGV[2] is the minimum time between two renewals of
-- a unit in ms. The other arguments belong to the script that follows.
-- Times are in ms. Versions and orders have 20 digits, so that they can be compared as strings.
--
-- Constants in these scripts limit the number of keys that one call accesses, so that no call
-- blocks Redis for long.
-- A renewal with several calls of renew.lua renews first the list of the unit's members, then the
-- members, and finally the head record and the time in `used`. If the renewal is interrupted, the
-- head record expires no later than any member, and the time in `used` is unchanged.
local RENEWED = 256
local prefix = KEYS[1]
local ttl, renew = tonumber(ARGV[1]), tonumber(ARGV[2])
local used, sizes, gone = prefix .. 'used', prefix .. 'sizes', prefix .. 'gone'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local HEAD = '^c1 %d+ (%d+) (%d+) ([%w_/-]*)\n'

local function record(id) return prefix .. 'r:' .. id end
local function members(unit) return prefix .. 'g:' .. unit end
local function unit_of(id, group) if group == '' then return id end return group end
local function id_of(member) return member:sub(22) end

-- Returns the first bytes of the value at a key, which contain HEAD, the length of the value in
-- bytes, and true if the value is a hash. Returns '' and 0 if the key does not exist.
local function look_at(key)
  local length = redis.pcall('STRLEN', key)
  if type(length) == 'number' then return redis.call('GETRANGE', key, 0, 255), length, false end
  local found = redis.call('HMGET', key, 'head', 'length')
  return found[1] or '', tonumber(found[2] or 0) or 0, true
end

-- Extends the life of a key until `at`. Does not change a key that expires later, because another
-- renewal may have extended its life further.
local function extend(key, at)
  local left = redis.call('PTTL', key)
  if left ~= -2 and (left == -1 or now + left < at) then redis.pcall('PEXPIREAT', key, at) end
end

local function extend_members(unit, first, count, at)
  extend(members(unit), at)
  local some = redis.call('ZRANGEBYLEX', members(unit), first, '+', 'LIMIT', 0, count)
  for _, member in ipairs(some) do extend(record(id_of(member)), at) end
  return some
end

local is_extended = false
-- Sets the time at which a unit was last used. Returns false if Redis accepts no writes now, for
-- example because its memory is full. Records can then still be read.
local function mark_used(unit, when)
  local taken = redis.pcall('ZADD', used, when, unit)
  if type(taken) == 'table' and taken.err then return false end
  if not is_extended then
    extend(used, now + ttl + renew)
    extend(sizes, now + ttl + renew)
    is_extended = true
  end
  return true
end

-- `due` has the units with too many members to be renewed by this call. The caller runs renew.lua
-- for each of them. `budget` is the number of members that this call may still renew.
local due, budget = {}, RENEWED
-- Records that a unit was used at `when`, and renews the unit if its last renewal was more than
-- `renew` ms before. Returns two times: the unit's head record lives until the first, and a new
-- member of the unit until the second. While renew.lua may be renewing the unit, it may miss a new
-- member. The time to live of a new member then starts now.
local function touch(unit, when, is_written)
  local last = tonumber(redis.call('ZSCORE', used, unit) or nil)
  local is_known = last and last + ttl > now
  if is_known and when - last <= renew then
    return last + ttl, (now - last > renew and now or last) + ttl
  end
  local size = redis.call('ZCARD', members(unit))
  if size > budget then
    due[#due + 1] = unit
    if is_known then return last + ttl, now + ttl end
    if is_written then mark_used(unit, when) end
  else
    budget = budget - size
    -- Do not renew a group without its head record, because the group is being removed.
    if is_written or redis.call('EXISTS', record(unit)) == 1 then
      if mark_used(unit, when) and size > 0 then
        extend_members(unit, '-', size, when + ttl)
      end
      extend(record(unit), when + ttl)
    end
  end
  return when + ttl, (last and now or when) + ttl
end
