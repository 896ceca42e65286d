-- The limits of one tenant. KEYS[1] is a hash:
--   r:<second>   requests that were reported as used in that second of Redis' clock
--   t:<second>   tokens
--   g:<gateway>  what one gateway process may use, in the order of FIELDS below
--   w            until when, in ms, nobody gets spare units, as somebody was refused for them
-- KEYS[2] is given for budgets alone, and never expires: what makes room takes other keys first.
--   d:<day>      tokens used in that day of Redis' clock, in UTC, counted from 1970
--   m:<day>      tokens used in the month that begins with that day
--   h:<gateway>  "<tokens granted> <lease's end in ms> <tokens reported>" of one gateway process
-- A field of another form is left alone and not counted: others may write here, too.
--
-- Units are requests, tokens and places, in this order in each list. All that a gateway is granted
-- counts as used now, for as long as its lease lasts. What it reports as used counts in the second
-- of the report, which is that of its use or a later one. So no 60 seconds have more than a limit.
-- The lease of a gateway that died becomes usage of the second in which it ends.
--
-- ARGV[1] is JSON, one gateway's whole state. Whatever it had spare and does not `keep`, it gave up:
--   gateway, lease_ms
--   call      grows with each call. An older call than the last one is ignored.
--   used      requests and tokens since the gateway began. Reported twice or late, a total is
--             counted once. `known` are those of the last answer, where the field is gone.
--   held      tokens and places of running requests
--   keep      spare units that it may be using meanwhile
--   limits    { code, limit, wanted by the first request that waits, or -1 }...
--   queued    units that further requests wait for: granted as far as they fit
--   wish      spare units that it has use for: granted within a share of what is free
--   floor     fewer spare units than this are of no use
--   spent, spent_known   with KEYS[2]: as used and known, for the budgets with these `codes`
-- Answer: { refused (which of the limits; 0 none), wait_ms, now_ms, fields of another form,
--           1 if returns of spare units could let the refused one in,
--           (granted now, share that one gateway may have spare) of each unit,
--           (used, held, reset_ms) of each limit, with all that was granted,
--           and with KEYS[2] counted now, (used, reset_ms) of each budget }
local WINDOW, BUSY, NEVER, EXPIRE = 60, 1000, -1, 180
-- A gateway may have one in so many of the free units spare, and nothing for a while after a refusal.
local SHARES, WITHHELD_MS = 16, 1000
local FIELDS = { 'ends', 'call', 'requests', 'tokens', 'places', 'spare_requests',
  'spare_tokens', 'spare_places', 'used_requests', 'used_tokens' }
local REQUESTS, TOKENS, PLACES = 1, 2, 3
local UNIT = { r = REQUESTS, t = TOKENS, c = PLACES, d = TOKENS, m = TOKENS }
local ask = cjson.decode(ARGV[1])
local time = redis.call('TIME')
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
local ends = now + ask.lease_ms
local key, own = KEYS[1], 'g:' .. ask.gateway

local function whole(number)
  return string.format('%.0f', number)
end

-- Whether this is a whole number that no sum of a few makes inexact.
local function fits(digits)
  return digits and #digits <= 15 and string.match(digits, '^%d+$')
end

-- Return nil for a value of another form.
local function record_of(value)
  local record, n = {}, 0
  for digits in string.gmatch(value, '%S+') do
    n = n + 1
    if not FIELDS[n] or not fits(digits) then return nil end
    record[FIELDS[n]] = tonumber(digits)
  end
  return n == #FIELDS and record or nil
end

-- What was used, by second and in all.
local sums, buckets, newest = { r = 0, t = 0 }, { r = {}, t = {} }, {}

local function add(code, at, count)
  buckets[code][at] = (buckets[code][at] or 0) + count
  sums[code] = sums[code] + count
  newest[code] = math.max(newest[code] or at, at)
end

local function count_used(code, at, count)
  if count <= 0 or at < second - WINDOW then return end
  redis.call('HINCRBY', key, code .. ':' .. whole(at), whole(count))
  add(code, at, count)
end

local mine, others, spare = nil, { 0, 0, 0 }, { 0, 0, 0 }
local unfit, withheld = 0, 0
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  local kind, rest = string.match(name, '^([rtg]):(.+)$')
  local record = kind == 'g' and record_of(value)
  local at = kind and kind ~= 'g' and fits(rest) and fits(value) and tonumber(rest)
  if name == own and record then
    mine = record
  elseif record and record.ends < now then
    count_used('r', math.floor(record.ends / 1000), record.requests)
    count_used('t', math.floor(record.ends / 1000), record.tokens)
    redis.call('HDEL', key, name)
  elseif record then
    others = { others[1] + record.requests, others[2] + record.tokens, others[3] + record.places }
    spare = { spare[1] + record.spare_requests, spare[2] + record.spare_tokens,
      spare[3] + record.spare_places }
  elseif name == 'w' and fits(value) and tonumber(value) <= now + WITHHELD_MS then
    withheld = tonumber(value)
  elseif not at or at > second + WINDOW then
    unfit = unfit + 1
  elseif at < second - WINDOW then
    redis.call('HDEL', key, name)
  else
    add(kind, at, tonumber(value))
  end
end
if mine and mine.call > ask.call then return {} end

local used = mine and { mine.used_requests, mine.used_tokens } or ask.known
count_used('r', second, ask.used[REQUESTS] - used[REQUESTS])
count_used('t', second, ask.used[TOKENS] - used[TOKENS])
used = { math.max(ask.used[REQUESTS], used[REQUESTS]), math.max(ask.used[TOKENS], used[TOKENS]) }
local granted = {}
for unit = 1, 3 do granted[unit] = ask.held[unit] + ask.keep[unit] end

local book  -- of budgets
if KEYS[2] then
  -- How long a gateway's field is kept after its lease: it says what was reported.
  local KEPT_MS = 3600000
  local field_of_mine = 'h:' .. ask.gateway
  book = { held = 0, reported = ask.spent_known, used = {}, from = {}, to = {} }

  -- The first day of a day's month, until February 2100. Years begin in March, four of them with
  -- that of 1968, 671 days before 1970; five months from March on always have 153 days.
  local function month_of(day)
    local of_four = (day + 671) % 1461
    local of_year = of_four - 365 * math.min(3, math.floor(of_four / 365))
    local month = math.floor((5 * of_year + 2) / 153)
    return day - of_year + math.floor((153 * month + 2) / 5)
  end
  local day = math.floor(second / 86400)
  book.from.d, book.to.d = day, day + 1
  book.from.m = month_of(day)
  book.to.m = month_of(book.from.m + 31)

  local function read(value)
    local held, lease, reported = string.match(value, '^(%d+) (%d+) (%d+)$')
    if not fits(held) or not fits(lease) or not fits(reported) then return nil end
    return tonumber(lease) < now and 0 or tonumber(held), tonumber(lease), tonumber(reported)
  end

  function book.reset(code)
    return book.to[code] * 86400000 - now
  end

  function book.write(held)
    local value = whole(held) .. ' ' .. whole(ends) .. ' ' .. whole(book.reported)
    redis.call('HSET', KEYS[2], field_of_mine, value)
  end

  -- Counts what this gateway has spent and not reported before.
  local function report()
    local new = math.max(0, ask.spent - book.reported)
    book.report = { new }
    for code in string.gmatch(ask.codes, '.') do
      local field = code .. ':' .. whole(book.from[code])
      local spent = redis.call('HGET', KEYS[2], field)
      if not spent or fits(spent) then
        book.used[code] = tonumber(spent or 0) + new
        if new > 0 then redis.call('HSET', KEYS[2], field, whole(book.used[code])) end
      end
      book.report[#book.report + 1] = book.used[code] or 0
      book.report[#book.report + 1] = book.reset(code)
    end
    book.reported = math.max(book.reported, ask.spent)
  end

  local all = redis.call('HGETALL', KEYS[2])
  for i = 1, #all, 2 do
    local name, value = all[i], all[i + 1]
    local kind, rest = string.match(name, '^([dmh]):(.+)$')
    local held, lease, reported
    if kind == 'h' then held, lease, reported = read(value) end
    local at = kind and kind ~= 'h' and fits(rest) and fits(value) and tonumber(rest)
    if held and name == field_of_mine then
      book.reported = reported
    elseif held then
      if lease + KEPT_MS < now then redis.call('HDEL', KEYS[2], name) end
      book.held = book.held + held
    elseif not at or at > book.from[kind] then
      unfit = unfit + 1
    elseif at < book.from[kind] then
      redis.call('HDEL', KEYS[2], name)
    end
  end
  report()
end

local function gone(at)
  return (at + WINDOW + 1) * 1000 - now
end

-- Until a request may pass that wants so much more than there is room for.
local function wait(code, excess)
  for at = second - WINDOW, newest[code] or 0 do
    excess = excess - (buckets[code][at] or 0)
    if excess <= 0 then return gone(at) end
  end
  return BUSY  -- the rest is what gateways are granted
end

local function counted(code)
  local unit = UNIT[code]
  if code == 'c' then return others[unit] + granted[unit] end
  if sums[code] then return sums[code] + others[unit] + granted[unit] end
  return (book.used[code] or 0) + book.held + granted[unit]
end

local refused, longest, returns = 0, 0, 1
local room, wanted = {}, { 0, 0, 0 }
for i, limit in ipairs(ask.limits) do
  local code, most, more = limit[1], limit[2], limit[3]
  local unit = UNIT[code]
  local free = most - counted(code)
  room[unit] = math.min(room[unit] or free, free)
  local waits = 0
  if more >= 0 and more > free then
    if more > most then
      waits = NEVER
    elseif sums[code] then
      waits = wait(code, more - free)
    elseif code ~= 'c' and (book.used[code] or 0) + more > most then
      waits = book.reset(code)
    else
      waits = BUSY
    end
    if waits == NEVER or more - free > spare[unit] then returns = 0 end
  end
  if more > 0 then wanted[unit] = more end
  if longest ~= NEVER and (waits > longest or waits == NEVER) then
    refused, longest = i, waits
  end
end
if refused == 0 then
  returns = 0
else
  wanted = { 0, 0, 0 }
end
if returns == 1 then
  withheld = now + WITHHELD_MS
  redis.call('HSET', key, 'w', whole(withheld))
end

local answer = { refused, longest, now, unfit, returns }
local unused, calm = {}, true
for unit = 1, 3 do
  local keep, more, share = ask.keep[unit], wanted[unit], 0
  if room[unit] then
    local free = room[unit] - more
    local queued = math.max(0, math.min(ask.queued[unit], free))
    free = free - queued
    more = more + queued
    if withheld <= now then share = math.max(0, math.floor((free + keep) / SHARES)) end
    local topped = math.min(ask.wish[unit], share)
    if topped >= ask.floor[unit] and topped > keep then
      more = more + topped - keep
      keep = topped
    end
    calm = calm and share >= ask.floor[unit]
  end
  granted[unit] = granted[unit] + more
  unused[unit] = keep
  answer[#answer + 1] = more
  answer[#answer + 1] = share
end
if granted[1] + granted[2] + granted[3] > 0 then
  -- A gateway that finds much room reports in a moment what it was given back: it may all be spare.
  local returned = calm and granted or unused
  redis.call('HSET', key, own, table.concat({ whole(ends), whole(ask.call), whole(granted[1]),
    whole(granted[2]), whole(granted[3]), whole(unused[1]), whole(returned[2]), whole(returned[3]),
    whole(used[1]), whole(used[2]) }, ' '))
elseif mine then
  redis.call('HDEL', key, own)
end
redis.call('EXPIRE', key, EXPIRE)
if book then book.write(granted[TOKENS]) end

for _, limit in ipairs(ask.limits) do
  local code = limit[1]
  local held, reset = 0, 0
  local count = counted(code)
  if sums[code] then
    local last = newest[code]
    if count - unused[UNIT[code]] > sums[code] then last = second end
    reset = last and gone(last) or 0
  elseif code ~= 'c' then
    held, reset = book.held + granted[TOKENS], book.reset(code)
    count = book.used[code] or 0
  end
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3] = count, held, reset
end
if book then
  for i = 1, #book.report do answer[#answer + 1] = book.report[i] end
end
return answer
