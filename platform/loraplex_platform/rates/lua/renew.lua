-- Extend the places that living requests hold.
--
-- KEYS  for each request: its admission, then the concurrency limits that it holds a place in.
-- ARGV  1 lease in ms, then two for each request: its id, how many limits.
-- A place that is gone comes back only while the admission stands: one that was just released must not.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local lease = tonumber(ARGV[1])
local until_ = string.format('%.0f', now + lease * 1000)
local at = 1

for i = 2, #ARGV, 2 do
    local id, count = ARGV[i], tonumber(ARGV[i + 1])
    local is_admitted = redis.call('EXISTS', KEYS[at]) == 1
    for key = at + 1, at + count do
        if is_admitted or redis.call('ZSCORE', KEYS[key], id) then
            redis.call('ZADD', KEYS[key], until_, id)
            redis.call('PEXPIRE', KEYS[key], lease * 2)
        end
    end
    at = at + count + 1
end
return 1
