-- The limits of one tenant. KEYS[1] is a hash:
--   r:<second>   requests counted in that second of Redis' clock
--   t:<second>   tokens
--   c:<gateway>  "<running requests> <lease's end in ms>" of one gateway process
-- The arithmetic is that of local.py, and is tested against it.
--
-- ARGV: 'take' gateway lease_ms requests tokens concurrent wanted    (a limit of -1: not counted)
--         -> { refused (0 none, 1 requests, 2 tokens, 3 concurrent), wait_ms, remaining requests,
--              reset_ms, remaining tokens, reset_ms, second }
--       'settle' gateway lease_ms second difference concurrent (0 or 1)
--       'renew' gateway lease_ms running                      (what this gateway really has)
local WINDOW, BUSY, NEVER, EXPIRE = 60, 1000, -1, 180
local time = redis.call('TIME')
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
local key, what, own = KEYS[1], ARGV[1], 'c:' .. ARGV[2]
local lease = now + tonumber(ARGV[3])

local function whole(number)
  return string.format('%.0f', number)
end

local function running_of(value)
  local count, ends = string.match(value, '^(%d+) (%d+)$')
  if tonumber(ends) < now then return 0 end
  return tonumber(count)
end

local function set_running(count)
  if count > 0 then
    redis.call('HSET', key, own, whole(count) .. ' ' .. whole(lease))
    redis.call('EXPIRE', key, EXPIRE)
  else
    redis.call('HDEL', key, own)
  end
end

if what == 'renew' then
  set_running(tonumber(ARGV[4]))
  return 1
end

if what == 'settle' then
  local slot = 't:' .. ARGV[4]
  local counted = tonumber(redis.call('HGET', key, slot))
  if counted then
    redis.call('HSET', key, slot, whole(math.max(0, counted + tonumber(ARGV[5]))))
  end
  if ARGV[6] == '1' then
    local held = redis.call('HGET', key, own)
    if held then set_running(running_of(held) - 1) end
  end
  return 1
end

local sums, slots, newest = { r = 0, t = 0 }, { r = {}, t = {} }, {}
local running, mine = 0, 0
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  local kind = string.sub(name, 1, 1)
  if kind == 'c' then
    local count = running_of(value)
    if count == 0 then redis.call('HDEL', key, name) end
    if name == own then mine = count end
    running = running + count
  else
    local at = tonumber(string.sub(name, 3))
    if at < second - WINDOW then
      redis.call('HDEL', key, name)
    else
      slots[kind][at] = tonumber(value)
      sums[kind] = sums[kind] + tonumber(value)
      newest[kind] = math.max(newest[kind] or at, at)
    end
  end
end

local function gone(at)
  return (at + WINDOW + 1) * 1000 - now
end

local function wait(kind, excess)
  if excess <= 0 then return 0 end
  for at = second - WINDOW, newest[kind] or 0 do
    excess = excess - (slots[kind][at] or 0)
    if excess <= 0 then return gone(at) end
  end
  return NEVER
end

local limits = { tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]) }
local wanted = tonumber(ARGV[7])
local waits = { 0, 0, 0 }
if limits[1] >= 0 then waits[1] = wait('r', sums.r + 1 - limits[1]) end
if limits[2] >= 0 then waits[2] = wait('t', sums.t + wanted - limits[2]) end
if limits[3] >= 0 and running >= limits[3] then waits[3] = BUSY end
local refused, longest = 0, 0
for i = 1, 3 do
  if longest ~= NEVER and (waits[i] > longest or waits[i] == NEVER) then
    refused, longest = i, waits[i]
  end
end

local function count(kind, amount)
  redis.call('HINCRBY', key, kind .. ':' .. time[1], amount)
  sums[kind] = sums[kind] + amount
  newest[kind] = math.max(newest[kind] or second, second)
end

if refused == 0 then
  if limits[1] >= 0 then count('r', 1) end
  if limits[2] >= 0 then count('t', wanted) end
  if limits[3] >= 0 then set_running(mine + 1) end
  redis.call('EXPIRE', key, EXPIRE)
end
return {
  refused, longest,
  math.max(0, limits[1] - sums.r), newest.r and gone(newest.r) or 0,
  math.max(0, limits[2] - sums.t), newest.t and gone(newest.t) or 0,
  second,
}
