-- The limits of one tenant. KEYS[1] is a hash:
--   r:<second>   requests counted in that second of Redis' clock
--   t:<second>   tokens
--   c:<gateway>  "<places taken> <lease's end in ms>" of one gateway process
-- A field of another form is left alone and not counted: others may write here, too.
-- The arithmetic is that of local.py, and is tested against it.
--
-- ARGV: 'take' gateway lease_ms requests tokens concurrent wanted places
--         (a limit of -1: not counted)
--         -> { refused (0 none, 1 requests, 2 tokens, 3 concurrent), wait_ms, remaining requests,
--              reset_ms, remaining tokens, reset_ms, now_ms, fields of another form }
--       'settle' gateway lease_ms since released at counted places
--       'renew' gateway lease_ms places                       (what this gateway really has)
local WINDOW, BUSY, NEVER, EXPIRE = 60, 1000, -1, 180
local time = redis.call('TIME')
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
local key, what, own = KEYS[1], ARGV[1], 'c:' .. ARGV[2]
local lease = now + tonumber(ARGV[3])

local function whole(number)
  return string.format('%.0f', number)
end

-- Whether this is a whole number that no sum of a few makes inexact.
local function fits(digits)
  return digits and #digits <= 15 and string.match(digits, '^%d+$')
end

-- nil for what is none
local function running_of(value)
  local count, ends = string.match(value, '^(%d+) (%d+)$')
  if not fits(count) or not fits(ends) then return nil end
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
  local held = redis.call('HGET', key, slot)
  if fits(held) then
    redis.call('HSET', key, slot, whole(math.max(0, tonumber(held) - tonumber(ARGV[5]))))
  end
  if tonumber(ARGV[7]) > 0 then
    redis.call('HINCRBY', key, 't:' .. ARGV[6], ARGV[7])
    redis.call('EXPIRE', key, EXPIRE)
  end
  if tonumber(ARGV[8]) > 0 then
    local mine = redis.call('HGET', key, own)
    if mine then set_running((running_of(mine) or 0) - tonumber(ARGV[8])) end
  end
  return 1
end

local sums, slots, newest = { r = 0, t = 0 }, { r = {}, t = {} }, {}
local running, mine, unfit = 0, 0, 0
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  local kind, rest = string.match(name, '^([rtc]):(.+)$')
  local count = kind == 'c' and running_of(value)
  local at = kind and kind ~= 'c' and fits(rest) and fits(value) and tonumber(rest)
  if count then
    if count == 0 then redis.call('HDEL', key, name) end
    if name == own then mine = count end
    running = running + count
  elseif not at or at > second + WINDOW then
    unfit = unfit + 1
  else
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
local wanted, places = tonumber(ARGV[7]), tonumber(ARGV[8])
local waits = { 0, 0, 0 }
if limits[1] >= 0 then waits[1] = wait('r', sums.r + 1 - limits[1]) end
if limits[2] >= 0 then waits[2] = wait('t', sums.t + wanted - limits[2]) end
if limits[3] >= 0 and running + places > limits[3] then
  waits[3] = places > limits[3] and NEVER or BUSY
end
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
  if limits[3] >= 0 then set_running(mine + places) end
  redis.call('EXPIRE', key, EXPIRE)
end
return {
  refused, longest,
  math.max(0, limits[1] - sums.r), newest.r and gone(newest.r) or 0,
  math.max(0, limits[2] - sums.t), newest.t and gone(newest.t) or 0,
  now, unfit,
}
