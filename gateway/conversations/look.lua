-- What gateways tell each other of the copies, and learn of Redis itself.
--   epoch     when Redis was last found empty, or far behind
--   since     when it has last lost something or has taken no writes
--   run       the id of the server that was looked at last: another one may have less
--   seen      the time of the last look, about
--   kept      what that was when something may have been lost: who has seen more knows how much
--   gateways  hash: of each one the epoch in which it has brought all that its disk has, and when it
--             has last looked
--   dirty     hash: how often each one has said that its disk has something more
--   left      when the last gateway went for good, with its disk
--   lost      what that was when the epoch began: of what began before, and was brought, a part may
--             have been on that disk alone
-- KEYS: these. ARGV: `epoch`, `since`, `seen` and `left` as the process has last heard, how far behind
-- Redis may be, how long silent a gateway; the gateway's name, or empty, and what it says, with the
-- epoch and the number of `dirty` that it speaks of; the gateways that the process knows of.
-- A name that begins with `ephemeral:` is of one whose disk ends with it.
-- Times are in ms of Redis' own clock since 1970; `seen` and `left` are never the same twice.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local gateways, dirty = KEYS[6], KEYS[7]
local told_epoch, told, told_left = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])

local function text(number) return string.format('%.0f', number) end
local function stored(key)
  local found = redis.call('GET', key)
  return found and #found <= 15 and found:match('^[1-9]%d*$') and tonumber(found)
end

local epoch, since, before = stored(KEYS[1]), stored(KEYS[2]), stored(KEYS[4]) or 0
local left, lost = stored(KEYS[8]) or 0, stored(KEYS[9]) or 0
local seen = math.max(now, before + 1, told) -- more with each look, whatever becomes of the clock
local taken = redis.pcall('SET', KEYS[4], text(seen))
if taken.err then
  -- Full, it takes a DEL: what it refuses meanwhile is on disks alone.
  redis.call('DEL', KEYS[2])
  if not epoch then return taken end
  return {text(epoch), '0', '0', text(before), text(left), text(lost), 1, 0, 0, text(now), '0', {}}
end
local run = redis.call('INFO', 'server'):match('run_id:(%w+)')
if not since or redis.call('GET', KEYS[3]) ~= run then
  since = now
  redis.call('SET', KEYS[2], text(since))
  redis.call('SET', KEYS[3], run)
  redis.call('SET', KEYS[5], text(before))
end
local is_news = ARGV[2] ~= text(since)
local is_behind = told - (stored(KEYS[5]) or 0) > tonumber(ARGV[5])
-- That a gateway has gone is lost: so may be what it wrote before.
local has_forgotten = told_epoch == text(epoch or 0) and told_left > left
if not epoch or is_news and (is_behind or has_forgotten) then
  epoch, since, lost = now, now, left
  redis.call('SET', KEYS[1], text(epoch))
  redis.call('SET', KEYS[2], text(since))
  redis.call('SET', KEYS[5], text(seen)) -- all is brought again, whoever has seen what
end

left = math.max(left, told_left)
if told_epoch ~= text(epoch) then
  lost = math.max(lost, told_left)
  for i = 11, #ARGV do redis.call('HSETNX', gateways, ARGV[i], '0 ' .. text(now)) end
end
local own, says, count, whole = ARGV[7], ARGV[8], 0, 0
if own ~= '' then
  count = tonumber(redis.call('HGET', dirty, own)) or 0
  local filled = (redis.call('HGET', gateways, own) or ''):match('^(%d+) ') or '0'
  if says == 'dirty' then count = redis.call('HINCRBY', dirty, own, 1) end
  local is_of_now = ARGV[9] == text(epoch) and tonumber(ARGV[10]) == count
  if says == 'dirty' or says == 'open' then
    filled = '0'
  elseif says == 'whole' and is_of_now then
    filled = text(epoch)
  end
  if says == 'bye' and is_of_now and filled == text(epoch) and not is_news then
    left, whole = seen, 1
    redis.call('HDEL', gateways, own)
    redis.call('HDEL', dirty, own)
  else
    redis.call('HSET', gateways, own, filled .. ' ' .. text(now))
  end
end

local open, oldest, names, rows = 0, now, {}, redis.call('HGETALL', gateways)
for i = 1, #rows, 2 do
  local filled, last = rows[i + 1]:match('^(%d+) (%d+)$')
  if not last or now - last > tonumber(ARGV[6]) then
    redis.call('HDEL', gateways, rows[i])
    redis.call('HDEL', dirty, rows[i])
    if rows[i]:match('^ephemeral:') then
      left = seen
      if filled ~= text(epoch) then lost = seen end
    end
  else
    names[#names + 1] = rows[i]
    oldest = math.min(oldest, tonumber(last))
    if filled ~= text(epoch) then
      open = open + 1
    elseif rows[i] == own then
      whole = 1
    end
  end
end
redis.call('SET', KEYS[8], text(left))
redis.call('SET', KEYS[9], text(lost))
local age = text(now - since)
return {text(epoch), text(since), age, text(seen), text(left), text(lost), open, count, whole,
  text(now), text(oldest), names}
