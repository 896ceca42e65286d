-- Polls Redis for one gateway process. The script detects that Redis has lost records, stores a
-- report of the process about its gateway's disk, and returns the reports of all gateways. Each
-- gateway has records on its disk, and uploads the records that Redis lacks.
-- KEYS, in this order:
--   epoch     time at which Redis was last found empty, or without many of its last writes. In each
--             epoch, each gateway uploads all records of its disk once.
--   since     time at which Redis last lost writes or refused writes
--   run       id of the Redis server at the last poll. A server with another id may lack writes.
--   seen      approximate time of the last poll
--   kept      value of `seen` that Redis had when writes may have been lost. If a process has read
--             a higher value of `seen`, all writes between these two times are lost.
--   gateways  hash: for each gateway, the epoch in which the gateway has uploaded all records of
--             its disk (0 if it has not), and the time of the gateway's last poll
--   dirty     hash: for each gateway, the number of its reports that its disk has a new record that
--             Redis lacks
--   left      time at which a gateway last ended for good, so that its disk was deleted
--   lost      value of `left` when the epoch began. An older record that was uploaded again may be
--             incomplete, because a newer version may have been only on that deleted disk.
-- ARGV, in this order: `epoch`, `since`, `seen` and `left` as the process has last read them;
-- maximum ms of lost writes for which the epoch does not change; ms without a poll after which a
-- gateway is removed; the gateway's name ('' to report nothing); the report; the epoch and the
-- number in `dirty` on which the report is based; the names of all gateways that the process knows.
-- The disk of a gateway is deleted with the gateway if the gateway's name begins with `ephemeral:`.
-- Times are in ms since 1970 of Redis' clock. `seen` and `left` never have the same value twice.
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
local seen = math.max(now, before + 1, told) -- grows with each poll, even if the clock is set back
local taken = redis.pcall('SET', KEYS[4], text(seen))
if taken.err then
  -- Redis refuses writes, for example because its memory is full, but accepts DEL. Delete `since`,
  -- so that the next poll that can write sets a new time.
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
-- Redis has lost the newest value of `left`, which this process has read before. Redis may
-- therefore also have lost records that the departed gateway wrote.
local has_forgotten = told_epoch == text(epoch or 0) and told_left > left
if not epoch or is_news and (is_behind or has_forgotten) then
  epoch, since, lost = now, now, left
  redis.call('SET', KEYS[1], text(epoch))
  redis.call('SET', KEYS[2], text(since))
  redis.call('SET', KEYS[5], text(seen)) -- no further loss: all records are uploaded again
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
