-- What gateways tell each other of the copies, and learn of Redis itself.
--   epoch     when Redis was last found empty, or far behind
--   since     when it has last lost something or has taken no writes
--   run       the id of the server that was looked at last: another one may have less
--   seen      the time of the last look, about
--   kept      what that was when something may have been lost: who has seen more knows how much
--   gateways  hash: of each one the epoch in which it has brought all that its disk has, and when it
--             has last looked
--   dirty     hash: how often each one has said that its disk has something more
-- KEYS: these. ARGV: `epoch`, `since` and `seen` as the process has last heard, how far behind Redis
-- may be, how long silent a gateway; the gateway's name, or empty, and what it says, with the epoch and
-- the number of `dirty` that it speaks of; the gateways that the process knows of.
-- Times are in ms of Redis' own clock since 1970.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local gateways, dirty = KEYS[6], KEYS[7]

local function text(number) return string.format('%.0f', number) end
local function stored(key)
  local found = redis.call('GET', key)
  return found and #found <= 15 and found:match('^[1-9]%d*$') and tonumber(found)
end

local epoch, since, before = stored(KEYS[1]), stored(KEYS[2]), stored(KEYS[4]) or 0
local told = tonumber(ARGV[3])
local seen = math.max(now, before + 1, told) -- more with each look, whatever becomes of the clock
local taken = redis.pcall('SET', KEYS[4], text(seen))
if taken.err then
  -- Full, it takes a DEL: what it refuses meanwhile is on disks alone.
  redis.call('DEL', KEYS[2])
  if not epoch then return taken end
  return {text(epoch), '0', '0', text(before), 1, 0, 0, {}}
end
local run = redis.call('INFO', 'server'):match('run_id:(%w+)')
if not since or redis.call('GET', KEYS[3]) ~= run then
  since = now
  redis.call('SET', KEYS[2], text(since))
  redis.call('SET', KEYS[3], run)
  redis.call('SET', KEYS[5], text(before))
end
local is_news = ARGV[2] ~= text(since)
if not epoch or is_news and told - (stored(KEYS[5]) or 0) > tonumber(ARGV[4]) then
  epoch, since = now, now
  redis.call('SET', KEYS[1], text(epoch))
  redis.call('SET', KEYS[2], text(since))
  redis.call('SET', KEYS[5], text(seen)) -- all is brought again, whoever has seen what
end

if ARGV[1] ~= text(epoch) then
  for i = 10, #ARGV do redis.call('HSETNX', gateways, ARGV[i], '0 ' .. text(now)) end
end
local own, says, count, whole = ARGV[6], ARGV[7], 0, 0
if own ~= '' then
  count = tonumber(redis.call('HGET', dirty, own)) or 0
  local filled = (redis.call('HGET', gateways, own) or ''):match('^(%d+) ') or '0'
  if says == 'dirty' then count = redis.call('HINCRBY', dirty, own, 1) end
  if says == 'dirty' or says == 'open' then
    filled = '0'
  elseif says == 'whole' and ARGV[8] == text(epoch) and tonumber(ARGV[9]) == count then
    filled = text(epoch)
  end
  redis.call('HSET', gateways, own, filled .. ' ' .. text(now))
end

local open, names, rows = 0, {}, redis.call('HGETALL', gateways)
for i = 1, #rows, 2 do
  local filled, last = rows[i + 1]:match('^(%d+) (%d+)$')
  if not last or now - last > tonumber(ARGV[5]) then
    redis.call('HDEL', gateways, rows[i])
    redis.call('HDEL', dirty, rows[i])
  else
    names[#names + 1] = rows[i]
    if filled ~= text(epoch) then
      open = open + 1
    elseif rows[i] == own then
      whole = 1
    end
  end
end
return {text(epoch), text(since), text(now - since), text(seen), open, count, whole, names}
