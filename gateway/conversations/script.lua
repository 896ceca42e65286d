-- One tenant's records; the keys have one hash tag. KEYS[1] is what they begin with, and behind it:
--   r:ID     string: a record, HEAD and its data; HEAD begins with the epoch that it was put in, 0
--            for what a disk has brought; expires
--   g:GROUP  sorted set: ORDER:ID of the group's members, all of score 0; expires
--   used     sorted set: when each unit (a group with its head, or a single record) was used last
--   sizes    hash: bytes by unit, and of all under @
-- A unit's times are renewed as a whole, and only where `renew` has passed since.
-- put ttl renew bytes members when {id version group order value}: as many as there are records.
--   -> -1: a unit would be too large. 0, removed, {unit}: not done yet, there was too much to remove;
--      of these units all, or the first. 1, removed, {unit}, and of each record 1: taken, 0: there
--      was the same, 2: a higher version, 3: there is something else, which stays.
-- get ttl renew bytes {id} -> -1: more than that. 1, {}, {value or nil}
-- members ttl renew bytes group first limit -> the same with the group's own HEAD and the ids by order
-- Times are in ms; versions and orders have 20 digits, so they compare as strings.
local prefix, operation = KEYS[1], ARGV[1]
local ttl, renew, bytes = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local used, sizes = prefix .. 'used', prefix .. 'sizes'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local HEAD = '^c1 %d+ (%d+) (%d+) ([%w_/-]*)\n'
local OVERHEAD, STEP = 512, 256

local function record(id) return prefix .. 'r:' .. id end
local function members(unit) return prefix .. 'g:' .. unit end
local function unit_of(id, group) if group == '' then return id end return group end
local function head_length(group) return 67 + #group end

-- Where Redis takes no writes now, it still can be read.
local write = operation == 'put' and redis.call or redis.pcall
-- Returns the time by which all of it expires.
local function touch(unit, when)
  local last = tonumber(redis.call('ZSCORE', used, unit) or nil)
  if last and when - last <= renew and last + ttl > now then return last end
  write('ZADD', used, when, unit)
  write('PEXPIREAT', used, now + ttl + renew)
  write('PEXPIREAT', sizes, now + ttl + renew)
  write('PEXPIREAT', record(unit), when + ttl)
  write('PEXPIREAT', members(unit), when + ttl)
  for _, member in ipairs(redis.call('ZRANGE', members(unit), 0, -1)) do
    write('PEXPIREAT', record(member:sub(22)), when + ttl)
  end
  return when
end

local function count(unit, change)
  redis.call('HINCRBY', sizes, '@', change)
  if redis.call('HINCRBY', sizes, unit, change) <= 0 then
    redis.call('HDEL', sizes, unit)
    redis.call('ZREM', used, unit)
  end
end

local removed, dropped = 0, {}
local function drop(unit)
  dropped[#dropped + 1] = unit
  -- The head first: what has lost its head is not found, however much of the rest is there.
  removed = removed + math.max(1, redis.call('UNLINK', record(unit)))
  while removed < STEP do
    local some = redis.call('ZRANGE', members(unit), 0, math.min(64, STEP - removed) - 1)
    if #some == 0 then
      redis.call('HINCRBY', sizes, '@', -(tonumber(redis.call('HGET', sizes, unit)) or 0))
      redis.call('HDEL', sizes, unit)
      redis.call('ZREM', used, unit)
      return
    end
    for _, member in ipairs(some) do redis.call('UNLINK', record(member:sub(22))) end
    redis.call('ZREM', members(unit), unpack(some))
    removed = removed + #some
  end
end

local function standing(id, version)
  local head = redis.call('GETRANGE', record(id), 0, 255)
  if head == '' then return 1 end
  local old, order, group = head:match(HEAD)
  if not old then return 3 end
  if old == version then return 0 end
  if old > version then return 2 end
  return 1, order, group
end

if operation == 'put' then
  local most, when = tonumber(ARGV[5]), tonumber(ARGV[6])
  if when < 0 or when > now then when = now end
  local units, of_units, need, added = {}, 0, 0, {}
  for i = 7, #ARGV, 5 do
    local id, group = ARGV[i], ARGV[i + 2]
    local unit = unit_of(id, group)
    if not units[unit] then units[unit], of_units = true, of_units + 1 end
    if standing(id, ARGV[i + 1]) == 1 then
      need = need + #ARGV[i + 4] - head_length(group) + OVERHEAD
      if group ~= '' then added[group] = (added[group] or 0) + 1 end
    end
  end
  local own = 0
  for unit in pairs(units) do own = own + (tonumber(redis.call('HGET', sizes, unit)) or 0) end
  if own + need > bytes then return {-1} end
  for group, more in pairs(added) do
    if redis.call('ZCARD', members(group)) + more > most then return {-1} end
  end
  local states = {1, 0, dropped}
  local found, i = nil, 1
  while (tonumber(redis.call('HGET', sizes, '@')) or 0) + need > bytes do
    if removed >= STEP then return {0, removed, dropped} end
    found = found or redis.call('ZRANGE', used, 0, of_units + STEP, 'WITHSCORES')
    while units[found[i] or ''] do i = i + 2 end
    local oldest, at = found[i], tonumber(found[i + 1] or nil)
    i = i + 2
    if not oldest then
      redis.call('HSET', sizes, '@', own) -- Redis has lost what was counted
      break
    end
    -- Nothing makes room for what was used before it.
    if at > when then when = now - ttl break end
    drop(oldest)
  end
  states[2] = removed
  for i = 7, #ARGV, 5 do
    local id, version, group, order, value = unpack(ARGV, i, i + 4)
    local state, old_order, old_group = standing(id, version)
    states[#states + 1] = state
    if state == 1 and when + ttl > now then
      if old_order then
        local length = redis.call('STRLEN', record(id)) - head_length(old_group)
        if old_group ~= '' then redis.call('ZREM', members(old_group), old_order .. ':' .. id) end
        count(unit_of(id, old_group), -length - OVERHEAD)
      end
      local unit = unit_of(id, group)
      local expires = touch(unit, when) + ttl
      redis.call('SET', record(id), value, 'PX', expires - now)
      if group ~= '' then
        redis.call('ZADD', members(group), 0, order .. ':' .. id)
        redis.call('PEXPIREAT', members(group), expires)
      end
      count(unit, #value - head_length(group) + OVERHEAD)
    end
  end
  return states
end

local ids, told = {}, {}
if operation == 'members' then
  local first, limit = '[' .. ARGV[6], ARGV[7]
  local found = redis.call('ZRANGEBYLEX', members(ARGV[5]), first, '+', 'LIMIT', 0, limit)
  told[1] = redis.call('GETRANGE', record(ARGV[5]), 0, 255)
  for i, member in ipairs(found) do ids[i], told[i + 1] = member:sub(22), member:sub(22) end
else
  for i = 5, #ARGV do ids[#ids + 1] = ARGV[i] end
end
local total = 0
for _, id in ipairs(ids) do
  total = total + redis.call('STRLEN', record(id))
  if total > bytes then return {-1} end
end
local values, live = {}, {}
for i, id in ipairs(ids) do
  local value = redis.call('GET', record(id))
  values[i] = value
  local _, last, _, _, group = string.find(value or '', HEAD)
  if last and #value > last then live[unit_of(id, group)] = true end
end
for unit in pairs(live) do touch(unit, now) end
return {1, told, values}
