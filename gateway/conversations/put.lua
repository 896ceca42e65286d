-- Puts records, and evicts the tenant's longest unused units where there is no room for them.
-- ARGV: bytes that the tenant may have, members that a group may have, when the records were used (-1:
-- now); bytes of the records that later calls put, and how many units those are in; notices that
-- `gone` may have; of each of those units {unit, members more}; then of each record
-- {id, version, group, order, token, value}. The value is under s:TOKEN unless the token is empty. With
-- the token # only its length is given: room is made for it, and nothing is put.
-- -> -1: a unit would be too large.
--    0, removed: ask again, there was too much to remove.
--    1, removed, notices, when, {units to be renewed}, {states}: of each record 1: taken, 0: there
--      was the same, 2: a higher version, 3: there is something else, which stays, 4: the value is
--      not there any more. Those without a state are to be put again.
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
  -- The head first: what has lost its head is not found, however much of the rest is there.
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
    if ARGV[i + 4] ~= '' then redis.call('UNLINK', staged(ARGV[i + 4])) end -- of # there is none
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
-- A put may have thousands of units, and each command costs 2 us.
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
    redis.call('HSET', sizes, '@', own) -- Redis has lost what was counted
    break
  end
  -- Nothing makes room for what was used before it.
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
