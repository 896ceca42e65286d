-- Extends the time to live of some members of a unit. The call that renews the last members also
-- renews the unit's head record and the unit's time of last use.
-- ARGV, after the arguments that records.lua describes: the unit, the time at which it was used,
-- and the last member (ORDER:ID) that the previous call has renewed ('' in the first call).
-- Returns the last member that this call has renewed, or '' if all members are renewed.
local unit, when, after = ARGV[3], math.min(now, tonumber(ARGV[4])), ARGV[5]
local last = redis.call('ZSCORE', used, unit)
-- Do not renew a unit that was removed meanwhile, or whose removal has started.
if not last or redis.call('EXISTS', record(unit)) == 0 then return '' end
-- Stop if Redis accepts no writes: `used` cannot be updated, so renewing the members is useless.
if not mark_used(unit, last) then return '' end
local some = extend_members(unit, after == '' and '-' or '(' .. after, RENEWED, when + ttl)
if #some == RENEWED then return some[#some] end
when = math.max(when, tonumber(last))
mark_used(unit, when)
extend(record(unit), when + ttl)
return ''
