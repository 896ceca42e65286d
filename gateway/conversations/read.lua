-- Reads records, and notes that they were used.
-- ARGV: 'get', {id}, or 'members', group, first, limit: those of the group's members from `first` on,
-- as ZRANGEBYLEX takes it.
-- -> when, {units to be renewed}, {values}, {ORDER:ID of members}, the group's own HEAD. A value is nil
--    where there is none. It is a number, its length, where it is too large to be copied by a script;
--    of a hash a negative one. Values that are missing at the end are to be asked for again.
local INLINE, LARGE = 1024 * 1024, 256 * 1024
local ids, found, head = {}, {}, ''
if ARGV[3] == 'members' then
  found = redis.call('ZRANGEBYLEX', members(ARGV[4]), ARGV[5], '+', 'LIMIT', 0, ARGV[6])
  head = look_at(record(ARGV[4]))
  for i, member in ipairs(found) do ids[i] = id_of(member) end
else
  for i = 4, #ARGV do ids[i - 3] = ARGV[i] end
end
local values, live, total = {}, {}, 0
for i, id in ipairs(ids) do
  local start, length, is_hash = look_at(record(id))
  local is_large = is_hash or length > LARGE
  if not is_large then
    total = total + length
    if total > INLINE then break end
  end
  if is_large then
    values[i] = is_hash and -length or length
  else
    values[i] = length > 0 and redis.call('GET', record(id))
  end
  local _, last, _, _, group = string.find(start, HEAD)
  if last and length > last then live[unit_of(id, group)] = true end
end
for unit in pairs(live) do touch(unit, now, false) end
return {now, due, values, found, head}
