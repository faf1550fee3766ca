-- Look at every limit, then take from all of them, or from none.
--
-- KEYS  1 versions, 2 epoch, 3 admission, 4.. one for each limit; all with one hash tag.
-- ARGV  1 request id, 2 epoch, 3 field of the key's version, 4 its version, 5 the tenant's version,
--       6 the limits' version, 7 mode, 8 lease in ms, 9 how long to remember the admission in ms,
--       then four for each limit: kind (b bucket, c concurrency), per minute, burst, amount.
-- mode  take; force: take whatever the versions say; look: take nothing.
-- reply id, verdict (OK, FULL, STALE, REBUILD), then three for each limit: what remains, microseconds
--       until it is full again, microseconds until this request fits (0: it does, -1: never will).
local PER_LIMIT = 4
local MINUTE = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local mode, lease = ARGV[7], tonumber(ARGV[8])

if redis.call('GET', KEYS[2]) ~= ARGV[2] then
    return {ARGV[1], 'REBUILD'}
end
if mode ~= 'force' then
    local newest = redis.call('HMGET', KEYS[1], ARGV[3], 't', 'l')
    for i = 1, 3 do
        if newest[i] and tonumber(newest[i]) > tonumber(ARGV[3 + i]) then
            return {ARGV[1], 'STALE'}
        end
    end
end

-- An admission whose answer was lost is asked for again: it has taken its share already.
local has_taken = redis.call('EXISTS', KEYS[3]) == 1
local takes = mode ~= 'look' and not has_taken
local levels, waits, is_full = {}, {}, false

for i = 4, #KEYS do
    local at = 10 + (i - 4) * PER_LIMIT
    local kind, rate = ARGV[at], tonumber(ARGV[at + 1])
    local burst, amount = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local level, wait = burst, 0
    if kind == 'c' then
        level = burst - redis.call('ZCOUNT', KEYS[i], '(' .. string.format('%.0f', now), '+inf')
        if level < amount then
            wait = burst < amount and -1 or 1000000
        end
    else
        local raw = redis.call('GET', KEYS[i])
        if raw then
            local last
            level, last = struct.unpack('<dd', raw)
            if last > now then
                -- The clock was put back: refill from here, not from a time that is far ahead.
                redis.call('SET', KEYS[i], struct.pack('<dd', level, now), 'KEEPTTL')
                last = now
            end
            level = math.min(burst, level + (now - last) * rate / MINUTE)
        end
        if burst < amount or rate <= 0 then
            wait = -1
        elseif level < amount then
            wait = math.ceil((amount - level) * MINUTE / rate)
        end
    end
    levels[i], waits[i] = level, wait
    is_full = is_full or wait ~= 0
end

local does_take = takes and not is_full
local reply = {ARGV[1], (is_full and not has_taken) and 'FULL' or 'OK'}
for i = 4, #KEYS do
    local at = 10 + (i - 4) * PER_LIMIT
    local kind, rate = ARGV[at], tonumber(ARGV[at + 1])
    local burst, amount = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local level = levels[i]
    if does_take then
        level = level - amount
        if kind == 'c' then
            local over = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', now, 'LIMIT', 0, 64)
            if #over > 0 then
                redis.call('ZREM', KEYS[i], unpack(over))
            end
            redis.call('ZADD', KEYS[i], string.format('%.0f', now + lease * 1000), ARGV[1])
            redis.call('PEXPIRE', KEYS[i], lease * 2)
        else
            -- A full bucket and none are the same.
            local full_ms = math.ceil((burst - level) * 60000 / rate) + 1000
            redis.call('SET', KEYS[i], struct.pack('<dd', level, now), 'PX',
                string.format('%.0f', full_ms))
        end
    end
    local reset = 0
    if kind ~= 'c' and level < burst then
        reset = rate > 0 and math.ceil((burst - level) * MINUTE / rate) or -1
    end
    reply[#reply + 1] = math.max(0, math.floor(level))
    reply[#reply + 1] = reset
    reply[#reply + 1] = has_taken and 0 or waits[i]
end
if does_take and #KEYS > 3 then
    redis.call('SET', KEYS[3], '1', 'PX', ARGV[9])
end
return reply
