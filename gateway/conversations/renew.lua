-- Renews some members of a unit, and the unit itself with the last of them.
-- ARGV: unit, when it was used, the last member that was renewed before, or empty.
-- -> the last member that was renewed, empty once all are.
local unit, when, after = ARGV[3], math.min(now, tonumber(ARGV[4])), ARGV[5]
local last = redis.call('ZSCORE', used, unit)
-- What was removed meanwhile, or is just being removed, does not come back.
if not last or redis.call('EXISTS', record(unit)) == 0 then return '' end
-- Where Redis takes no writes, the members are not renewed in vain.
if not mark_used(unit, last) then return '' end
local some = extend_members(unit, after == '' and '-' or '(' .. after, RENEWED, when + ttl)
if #some == RENEWED then return some[#some] end
when = math.max(when, tonumber(last))
mark_used(unit, when)
extend(record(unit), when + ttl)
return ''
