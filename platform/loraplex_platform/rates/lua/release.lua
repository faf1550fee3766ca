-- Give back what an admission took: its places, and of each bucket what was not used after all.
--
-- KEYS  1 admission, 2.. one for each limit; all with one hash tag.
-- ARGV  1 request id, then four for each limit: kind, per minute, burst, refund (may be negative).
-- reply whether there was an admission; without one no bucket is touched, so a second call is harmless.
local PER_LIMIT = 4
local MINUTE = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local was_admitted = redis.call('DEL', KEYS[1])

for i = 2, #KEYS do
    local at = 2 + (i - 2) * PER_LIMIT
    local rate, burst = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local refund = tonumber(ARGV[at + 3])
    if ARGV[at] == 'c' then
        redis.call('ZREM', KEYS[i], ARGV[1])
    elseif was_admitted == 1 and refund ~= 0 and rate > 0 then
        local raw = redis.call('GET', KEYS[i])
        local level, last = burst, now
        if raw then
            level, last = struct.unpack('<dd', raw)
            level = math.min(burst, level + math.max(0, now - last) * rate / MINUTE)
        end
        level = math.min(burst, level + refund)
        local full_ms = math.ceil((burst - level) * 60000 / rate) + 1000
        redis.call('SET', KEYS[i], struct.pack('<dd', level, now), 'PX',
            string.format('%.0f', full_ms))
    end
end
return was_admitted
