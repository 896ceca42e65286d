-- Stores records of a tenant. If the tenant has too few free bytes, first evicts the units that
-- have not been used for longest.
-- ARGV, after the arguments that records.lua describes:
--   3  maximum number of bytes that the tenant's records may have
--   4  maximum number of members that a group may have
--   5  time at which the records were used; -1 for now
--   6  bytes of the records that later calls will store
--   7  number of units to which those later records belong
--   8  maximum number of notices in `gone`
--   then, for each unit of the later records: the unit, and the number of members to be added to it
--   then, for each record: id, version, group, order, token, value. If the token is empty, `value`
--   is the value of the record. Otherwise the value is in the key s:TOKEN. With the token #,
--   `value` is only the length of the record's value: the script evicts units to make space for the
--   record, but does not store the record.
-- Returns one of:
--   {-1}: a unit would become too large. Nothing was stored.
--   {0, removed, notices}: too many records had to be evicted for one call. The caller must repeat
--     the call.
--   {1, removed, notices, when, {units that the caller must renew with renew.lua}, {states}}: the
--     state of a record is 1 if the record was stored, 0 if Redis has the same version, 2 if Redis
--     has a higher version, 3 if the key has a value that is not a record (it is not changed), and
--     4 if the value in s:TOKEN no longer exists. The caller must put records without a state
--     again.
-- `removed` is the number of evicted records, and `notices` the number of notices added to `gone`.
local OVERHEAD, STEP, FREED = 512, 256, 16 * 1024 * 1024
local DELETED, GROWING = '09223372036854775807', '^conv_'
local bytes, most, when = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local need, of_later, first = tonumber(ARGV[6]), tonumber(ARGV[7]), 9
local kept_notices = ARGV[8]
if when < 0 or when > now then when = now end

local function head_length(group) return 67 + #group end
local function staged(token) return prefix .. 's:' .. token end
local function length_of(token, value)
  if token == '' then return #value end
  if token == '#' then return tonumber(value) end
  local _, length = look_at(staged(token))
  return length
end

local notices = 0
local function notify(kind, name)
  redis.call('XADD', gone, 'MAXLEN', '~', kept_notices, '*', kind, name)
  notices = notices + 1
end

local removed, freed = 0, 0
local function remove(id)
  local _, length = look_at(record(id))
  freed = freed + length
  return redis.call('UNLINK', record(id))
end
local function is_spent() return removed >= STEP or freed >= FREED end

local function drop(unit)
  if unit:match(GROWING) then notify('u', unit) end
  -- Remove the head record first. Readers do not find a unit without its head record, even if other
  -- records of the unit still exist.
  removed = removed + math.max(1, remove(unit))
  while not is_spent() do
    local some = redis.call('ZRANGE', members(unit), 0, 15)
    if #some == 0 then
      redis.call('HINCRBY', sizes, '@', -(tonumber(redis.call('HGET', sizes, unit)) or 0))
      redis.call('HDEL', sizes, unit)
      redis.call('ZREM', used, unit)
      return
    end
    local gone_now = {}
    for _, member in ipairs(some) do
      if is_spent() then break end
      remove(id_of(member))
      removed, gone_now[#gone_now + 1] = removed + 1, member
    end
    redis.call('ZREM', members(unit), unpack(gone_now))
  end
end

local function standing(id, version)
  local head, length = look_at(record(id))
  if head == '' then return 1 end
  local old, order, group = head:match(HEAD)
  if not old then return 3 end
  if old == version then return 0 end
  if old > version then return 2 end
  return 1, order, group, length
end

local function discard(from)
  for i = from, #ARGV, 6 do
    if ARGV[i + 4] ~= '' then redis.call('UNLINK', staged(ARGV[i + 4])) end -- for #: no key
  end
end

local units, of_units, added = {}, 0, {}
local function protect(unit)
  if not units[unit] then units[unit], of_units = true, of_units + 1 end
end
for _ = 1, of_later do
  protect(ARGV[first])
  added[ARGV[first]] = tonumber(ARGV[first + 1])
  first = first + 2
end
for i = first, #ARGV, 6 do
  local id, version, group = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  protect(unit_of(id, group))
  if standing(id, version) == 1 then
    need = need + length_of(ARGV[i + 4], ARGV[i + 5]) - head_length(group) + OVERHEAD
    if group ~= '' then added[group] = (added[group] or 0) + 1 end
  end
end
local own, names = 0, {}
for unit in pairs(units) do names[#names + 1] = unit end
-- Read the sizes of 500 units per command. A call may have thousands of units, and each command
-- takes 2 us.
for i = 1, #names, 500 do
  local some = redis.call('HMGET', sizes, unpack(names, i, math.min(i + 499, #names)))
  for _, size in ipairs(some) do own = own + (tonumber(size) or 0) end
end
if own + need > bytes then discard(first) return {-1} end
for group, more in pairs(added) do
  if more > 0 and redis.call('ZCARD', members(group)) + more > most then discard(first) return {-1} end
end
local found, place = nil, 1
while (tonumber(redis.call('HGET', sizes, '@')) or 0) + need > bytes do
  if is_spent() then discard(first) return {0, removed, notices} end
  found = found or redis.call('ZRANGE', used, 0, of_units + STEP, 'WITHSCORES')
  while units[found[place] or ''] do place = place + 2 end
  local oldest, at = found[place], tonumber(found[place + 1] or nil)
  place = place + 2
  if not oldest then
    redis.call('HSET', sizes, '@', own) -- wrong sum: Redis has lost some data
    break
  end
  -- Do not evict a unit that was used after the new records. Treat the records as expired instead.
  if at > when then when = now - ttl break end
  drop(oldest)
end

local states, changes, total = {}, {}, 0
local function count(unit, change)
  changes[unit], total = (changes[unit] or 0) + change, total + change
end
local touched = {}
local function times_of(unit)
  if not touched[unit] then touched[unit] = {touch(unit, when, true)} end
  return unpack(touched[unit])
end
for i = first, #ARGV, 6 do
  if freed >= FREED and i > first then discard(i) break end
  local id, version, group, order, token, value = unpack(ARGV, i, i + 5)
  local state, old_order, old_group, old_length = standing(id, version)
  local length = length_of(token, value)
  if state == 1 and length == 0 then state = 4 end
  if state == 1 and when + ttl > now and token ~= '#' then
    if old_order then
      freed = freed + old_length
      if old_group ~= '' then redis.call('ZREM', members(old_group), old_order .. ':' .. id) end
      count(unit_of(id, old_group), head_length(old_group) - old_length - OVERHEAD)
    end
    local unit = unit_of(id, group)
    local head_at, member_at = times_of(unit)
    local at = id == unit and head_at or member_at
    if token == '' then
      redis.call('SET', record(id), value, 'PX', at - now)
    else
      redis.call('RENAME', staged(token), record(id))
      redis.call('PEXPIREAT', record(id), at)
    end
    if group ~= '' then
      redis.call('ZADD', members(group), 0, order .. ':' .. id)
      extend(members(group), at)
    end
    count(unit, length - head_length(group) + OVERHEAD)
    if version == DELETED then notify('i', id) end
  elseif token ~= '' then
    redis.call('UNLINK', staged(token))
  end
  states[#states + 1] = state
end
if next(changes) then redis.call('HINCRBY', sizes, '@', total) end
for unit, change in pairs(changes) do
  if redis.call('HINCRBY', sizes, unit, change) <= 0 then
    redis.call('HDEL', sizes, unit)
    redis.call('ZREM', used, unit)
  end
end
extend(sizes, now + ttl + renew)
if notices > 0 then extend(gone, now + ttl + renew) end
return {1, removed, notices, when, due, states}
