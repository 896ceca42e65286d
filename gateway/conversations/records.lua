-- What all scripts on one tenant's records begin with. The keys have one hash tag: KEYS[1] is what
-- they begin with, and behind it is
--   r:ID     string: a record, HEAD and its data; HEAD begins with the epoch that it was put in, 0
--            for what a disk has brought; expires. A large record is a hash: its HEAD under head,
--            the bytes of all under length, and parts of it under 0, 1, ...
--   g:GROUP  sorted set: ORDER:ID of the group's members, all of score 0; expires
--   s:TOKEN  a large value before it becomes a record; expires within a minute
--   used     sorted set: when each unit (a group with its head, or a single record) was used last
--   sizes    hash: bytes by unit, and of all under @
--   gone     stream: ids of deleted records (i) and of evicted groups (u); expires
-- ARGV: the time to live, and after how long it is renewed, in ms; then the script's own.
-- Times are in ms; versions and orders have 20 digits, so they compare as strings.
--
-- No call touches more keys than these bounds say, so none blocks Redis for long.
-- A unit is renewed in this order: the list of its members, the members, its head and `used`. So
-- a renewal that is cut leaves a head that expires no later than any member, and the unit as old
-- as it was.
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

-- Returns the head of the value at a key, its bytes, and whether it is a hash.
local function look_at(key)
  local length = redis.pcall('STRLEN', key)
  if type(length) == 'number' then return redis.call('GETRANGE', key, 0, 255), length, false end
  local found = redis.call('HMGET', key, 'head', 'length')
  return found[1] or '', tonumber(found[2] or 0) or 0, true
end

-- A key that lives longer keeps its time: another renewal may be further.
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
-- Returns false where Redis takes no writes now: it can still be read.
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

-- Units that are too large to be renewed by this call: the caller runs renew.lua for each.
local due, budget = {}, RENEWED
-- Notes the use of a unit at `when`, and returns until when its head and a new member live. While a
-- renewal may be under way, a member that it does not see lives from now on.
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
    -- A group without its head is being removed.
    if is_written or redis.call('EXISTS', record(unit)) == 1 then
      if mark_used(unit, when) and size > 0 then
        extend_members(unit, '-', size, when + ttl)
      end
      extend(record(unit), when + ttl)
    end
  end
  return when + ttl, (last and now or when) + ttl
end
