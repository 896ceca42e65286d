-- Counts the usage of one tenant's limits, and admits or refuses the first waiting request of a
-- gateway process. The script grants units to the process. A unit is a request, a token or a slot
-- (a request that runs now; called a place in FIELDS). With spare units, a process admits requests
-- without a call of this script.
-- KEYS[1] is a hash:
--   r:<second>   number of requests that were reported as used in this second of Redis' clock
--   t:<second>   number of tokens that were reported as used in this second
--   g:<gateway>  units that are granted to one gateway process, as numbers in the order of FIELDS
--   w            time in ms until which no gateway gets spare units, because a request was refused
-- KEYS[2] is given only if the tenant has budgets. It never expires, so that Redis evicts keys that
-- expire before it evicts this key. It is a hash:
--   d:<day>      tokens used in this day of Redis' clock, in UTC. Days are counted from 1970.
--   m:<day>      tokens used in the month that begins with this day
--   h:<gateway>  "<tokens granted> <end of the lease in ms> <tokens reported>" of a process
-- A field of another form is not counted and not changed, because another program may have written
-- it.
--
-- Lists of units have the order requests, tokens, slots. All units that are granted to a gateway
-- count as used until its lease ends. Usage counts in the second in which the gateway reports it,
-- which is never before the second of the use. The usage in 60 seconds therefore never exceeds a
-- limit. When the lease of a dead gateway ends, its granted units count as used in that second.
--
-- ARGV[1] is a JSON object with the complete state of one gateway process. The process gives back
-- all its spare units that are not in `keep`.
--   gateway   name of the process
--   lease_ms  duration of the lease
--   call      number of the call. A call with a lower number than an earlier call is ignored.
--   used      requests and tokens that the process has used since its start. Because these are
--             totals, usage that is reported twice or late is counted once.
--   known     value of `used` in the last answered call. Needed if Redis has lost g:<gateway>.
--   held      units of running requests
--   keep      spare units that the process may use until it gets the answer
--   limits    for each limit: { code, limit, units that the first waiting request needs, or -1 }
--   queued    units that the other waiting requests need. They are granted as far as they are free.
--   wish      spare units that the process wants. They are granted up to a share of the free units.
--   floor     minimum number of spare units: fewer are not granted, because they would be useless
--   spent, spent_known   with KEYS[2]: like `used` and `known`, for tokens of budgets
--   codes     with KEYS[2]: the letters of the tenant's budgets (d for a day, m for a month)
--   totals    with KEYS[2]: for each budget that the process knows: { code, first day of the period,
--             tokens used in it }. If Redis has lost its data, the usage continues at this number.
-- The answer is a list of numbers:
--   number of the limit that refuses the request (from 1; 0 if none), wait_ms, now_ms, number of
--   fields of another form, and 1 if the request could be admitted if gateways gave back their
--   spare units
--   for each kind of unit: newly granted units, and maximum of spare units of one gateway
--   for each limit: used units including all granted units, held units, reset_ms
--   with KEYS[2]: number of tokens that this call has counted, and for each budget: used, reset_ms
local WINDOW, BUSY, NEVER, EXPIRE = 60, 1000, -1, 180
-- A gateway may have 1 / SHARES of the free units as spare units, and no spare units within
-- WITHHELD_MS after a refusal.
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

-- Returns true if `digits` is an integer that is small enough for exact sums of a few such numbers.
local function fits(digits)
  return digits and #digits <= 15 and string.match(digits, '^%d+$')
end

-- Returns the numbers in a value of g:<gateway>, by their names in FIELDS. Returns nil if the value
-- has another form.
local function record_of(value)
  local record, n = {}, 0
  for digits in string.gmatch(value, '%S+') do
    n = n + 1
    if not FIELDS[n] or not fits(digits) then return nil end
    record[FIELDS[n]] = tonumber(digits)
  end
  return n == #FIELDS and record or nil
end

-- Used requests and tokens in total and by second, and the last second in which any were used.
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

local book  -- usage of the budgets; nil without KEYS[2]
if KEYS[2] then
  -- Time for which the field h:<gateway> is retained after its lease has ended. With the field, tokens
  -- that the gateway reports again are not counted again.
  local KEPT_MS = 3600000
  local field_of_mine = 'h:' .. ask.gateway
  book = { held = 0, reported = ask.spent_known, used = {}, from = {}, to = {} }

  -- Returns the first day of the month in which a day lies. Days are counted from 1970. The result
  -- is right until February 2100. In this calculation, a year begins in March, and a leap day is
  -- the last day of its year. Years are counted in groups of four from March 1968, 671 days before
  -- 1970. From March on, five months always have 153 days.
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

  -- Adds the tokens that this gateway has spent since its last report to the usage of each budget.
  local function report()
    local new = math.max(0, ask.spent - book.reported)
    local least = {}
    for _, total in ipairs(ask.totals) do
      if total[2] == book.from[total[1]] then least[total[1]] = total[3] end
    end
    book.report = { new }
    for code in string.gmatch(ask.codes, '.') do
      local field = code .. ':' .. whole(book.from[code])
      local spent = redis.call('HGET', KEYS[2], field)
      if not spent or fits(spent) then
        local known = tonumber(spent or 0)
        book.used[code] = math.max(known, least[code] or 0) + new
        if book.used[code] > known then
          redis.call('HSET', KEYS[2], field, whole(book.used[code]))
        end
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
      -- A Redis that has lost its last writes knows less than the gateway, whose `totals` have the
      -- tokens that were counted before.
      book.reported = math.max(reported, ask.spent_known)
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

-- Returns the ms until a request can be admitted that needs `excess` more units than are free.
local function wait(code, excess)
  for at = second - WINDOW, newest[code] or 0 do
    excess = excess - (buckets[code][at] or 0)
    if excess <= 0 then return gone(at) end
  end
  return BUSY  -- the other units are granted to gateways, for an unknown time
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
  -- If many units are free (`calm`), the gateway soon returns units that finished requests did not
  -- need. All its granted tokens and slots may therefore become spare.
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
