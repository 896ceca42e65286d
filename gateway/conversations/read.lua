-- Reads records of a tenant, and updates the times at which their units were last used.
-- ARGV, after the arguments that records.lua describes, one of:
--   'get', and the ids of the records to read.
--   'members', a group, a lower bound in the syntax of ZRANGEBYLEX, and a maximum number: reads the
--   group's members from the lower bound on.
-- Returns the time, {units that the caller must renew with renew.lua}, {values}, {ORDER:ID of the
-- members}, and HEAD of the group's head record.
-- A value is nil if the record does not exist. If a value is too large to be copied by a script,
-- its length in bytes is returned instead. The length is negative if the value is a hash. If all
-- values together are larger than INLINE bytes, the last values are missing from the list, and the
-- caller must read them with another call.
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
