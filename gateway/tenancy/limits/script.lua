-- The limits of one tenant. KEYS[1] is a hash:
--   r:<second>   requests counted in that second of Redis' clock
--   t:<second>   tokens
--   c:<gateway>  "<places taken> <lease's end in ms>" of one gateway process
-- KEYS[2] is given for budgets alone, and never expires: what makes room takes other keys first.
--   d:<day>      tokens used in that day of Redis' clock, in UTC, counted from 1970
--   m:<day>      tokens used in the month that begins with that day
--   h:<gateway>  "<tokens held> <lease's end in ms> <tokens told>" of one gateway process
-- A field of another form is left alone and not counted: others may write here, too.
-- The arithmetic is that of local.py, and is tested against it; that of budgets against a model.
--
-- ARGV: 'take' gateway lease_ms (code limit wanted)...
--         -> { refused (which of those; 0 none), wait_ms, now_ms, fields of another form,
--              (used, held, reset_ms)... }
--       'settle' gateway lease_ms codes since released at used kept places         -> {}
--       'renew' gateway lease_ms places held              (what this gateway really has)   -> {}
--     With KEYS[2] three more at the end: codes of the budgets, spent, known. Of the tokens that
--     this gateway has `spent` since it began, those not told before are counted now; `known` stands
--     for those where its field is gone. Told twice or late, a total does no harm.
--         -> the above, and then { counted now, (used, reset_ms) of each budget }
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

local book  -- of budgets
if KEYS[2] then
  -- How long a gateway's field is kept after its lease: it says what was told.
  local KEPT_MS = 3600000
  local codes, spent = ARGV[#ARGV - 2], tonumber(ARGV[#ARGV - 1])
  local mine = 'h:' .. ARGV[2]
  book = { held = 0, mine = 0, told = tonumber(ARGV[#ARGV]), used = {}, from = {}, to = {} }

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
    local held, ends, told = string.match(value, '^(%d+) (%d+) (%d+)$')
    if not fits(held) or not fits(ends) or not fits(told) then return nil end
    return tonumber(ends) < now and 0 or tonumber(held), tonumber(ends), tonumber(told)
  end

  function book.reset(code)
    return book.to[code] * 86400000 - now
  end

  function book.write()
    local value = whole(book.mine) .. ' ' .. whole(lease) .. ' ' .. whole(book.told)
    redis.call('HSET', KEYS[2], mine, value)
  end

  -- Counts what this gateway has spent and not told before.
  function book.tell()
    local new = math.max(0, spent - book.told)
    book.report = { new }
    for code in string.gmatch(codes, '.') do
      local field = code .. ':' .. whole(book.from[code])
      local used = redis.call('HGET', KEYS[2], field)
      if not used or fits(used) then
        book.used[code] = tonumber(used or 0) + new
        if new > 0 then redis.call('HSET', KEYS[2], field, whole(book.used[code])) end
      end
      book.report[#book.report + 1] = book.used[code] or 0
      book.report[#book.report + 1] = book.reset(code)
    end
    book.told = math.max(book.told, spent)
    return new
  end

  -- Reads this gateway's field alone.
  function book.own()
    local held, _, told = read(redis.call('HGET', KEYS[2], mine) or '')
    if held then book.mine, book.told = held, told end
  end

  -- Reads all, and returns how many are of another form.
  function book.all()
    local unfit = 0
    local fields = redis.call('HGETALL', KEYS[2])
    for i = 1, #fields, 2 do
      local name, value = fields[i], fields[i + 1]
      local kind, rest = string.match(name, '^([dmh]):(.+)$')
      local held, ends, told
      if kind == 'h' then held, ends, told = read(value) end
      local at = kind and kind ~= 'h' and fits(rest) and fits(value) and tonumber(rest)
      if held then
        if ends + KEPT_MS < now then redis.call('HDEL', KEYS[2], name) end
        if name == mine then book.mine, book.told = held, told end
        book.held = book.held + held
      elseif not at or at > book.from[kind] then
        unfit = unfit + 1
      elseif at < book.from[kind] then
        redis.call('HDEL', KEYS[2], name)
      end
    end
    return unfit
  end
end

if what == 'renew' then
  set_running(tonumber(ARGV[4]))
  if not book then return {} end
  book.own()
  book.mine = tonumber(ARGV[5])
  book.tell()
  book.write()
  return book.report
end

if what == 'settle' then
  local released, used, kept = tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[9])
  local places = tonumber(ARGV[10])
  if string.find(ARGV[4], 't', 1, true) then
    local slot = 't:' .. ARGV[5]
    local held = redis.call('HGET', key, slot)
    if fits(held) then
      redis.call('HSET', key, slot, whole(math.max(0, tonumber(held) - released)))
    end
    if used + kept > 0 then
      redis.call('HINCRBY', key, 't:' .. ARGV[7], used + kept)
      redis.call('EXPIRE', key, EXPIRE)
    end
  end
  if places > 0 then
    local mine = redis.call('HGET', key, own)
    if mine then set_running((running_of(mine) or 0) - places) end
  end
  if not book then return {} end
  book.own()
  book.mine = math.max(0, book.mine - released + kept)
  book.tell()
  book.write()
  return book.report
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
if book then
  unfit = unfit + book.all()
  book.tell()
end

local function gone(at)
  return (at + WINDOW + 1) * 1000 - now
end

-- Until a request may pass that wants so much more than there is room for.
local function wait(kind, excess)
  if excess <= 0 then return 0 end
  for at = second - WINDOW, newest[kind] or 0 do
    excess = excess - (slots[kind][at] or 0)
    if excess <= 0 then return gone(at) end
  end
  return NEVER
end

local last = #ARGV - (book and 3 or 0)
local refused, longest = 0, 0
for i = 4, last, 3 do
  local code, limit, wanted = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local waits = 0
  if sums[code] then
    waits = wait(code, sums[code] + wanted - limit)
  elseif wanted > limit then
    waits = NEVER
  elseif code == 'c' then
    if running + wanted > limit then waits = BUSY end
  elseif (book.used[code] or 0) + wanted > limit then
    waits = book.reset(code)
  elseif (book.used[code] or 0) + book.held + wanted > limit then
    waits = BUSY
  end
  if longest ~= NEVER and (waits > longest or waits == NEVER) then
    refused, longest = (i - 1) / 3, waits
  end
end

local answer = { refused, longest, now, unfit }
local held_more = 0
for i = 4, last, 3 do
  local code, wanted = ARGV[i], tonumber(ARGV[i + 2])
  if refused ~= 0 then wanted = 0 end
  local used, held, reset = 0, 0, 0
  if code == 'c' then
    used = running + wanted
    if wanted > 0 then set_running(mine + wanted) end
  elseif sums[code] then
    if refused == 0 then
      redis.call('HINCRBY', key, code .. ':' .. time[1], wanted)
      newest[code] = math.max(newest[code] or second, second)
    end
    used = sums[code] + wanted
    reset = newest[code] and gone(newest[code]) or 0
  else
    used, held, reset = book.used[code] or 0, book.held + wanted, book.reset(code)
    held_more = wanted
  end
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3] = used, held, reset
end
if refused == 0 then redis.call('EXPIRE', key, EXPIRE) end
if book then
  book.mine = book.mine + held_more
  if held_more > 0 or book.report[1] > 0 then book.write() end
  for i = 1, #book.report do answer[#answer + 1] = book.report[i] end
end
return answer
