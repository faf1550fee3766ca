-- Look at a bucket that fills by the minute, and take from it what it has, up to an amount.
--
-- KEYS  1 the bucket.
-- ARGV  1 per minute, 2 burst, 3 amount; 0: only look.
-- reply microseconds until one can be taken.
local MINUTE = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rate, burst, amount = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local level = burst
local raw = redis.call('GET', KEYS[1])
if raw then
    local last
    level, last = struct.unpack('<dd', raw)
    level = math.min(burst, level + math.max(0, now - last) * rate / MINUTE)
end
if amount > 0 then
    level = math.max(0, level - amount)
    local full_ms = math.ceil((burst - level) * 60000 / rate) + 1000
    redis.call('SET', KEYS[1], struct.pack('<dd', level, now), 'PX', string.format('%.0f', full_ms))
end
return level >= 1 and 0 or math.ceil((1 - level) * MINUTE / rate)
