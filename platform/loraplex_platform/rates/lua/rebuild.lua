-- Put back the places of requests that run, and say that this Redis is up to date.
--
-- KEYS  1 epoch, 2.. concurrency gauges; all with one hash tag.
-- ARGV  1 epoch, 2 how long it holds in ms, 3 lease in ms, then two for each place: which gauge
--       (as a position in KEYS), request id.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local lease = tonumber(ARGV[3])
local until_ = string.format('%.0f', now + lease * 1000)

for i = 4, #ARGV, 2 do
    local key = KEYS[tonumber(ARGV[i])]
    redis.call('ZADD', key, until_, ARGV[i + 1])
    redis.call('PEXPIRE', key, lease * 2)
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
