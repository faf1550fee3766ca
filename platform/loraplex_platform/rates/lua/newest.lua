-- Set fields of a hash to numbers, each only if it grows.
--
-- KEYS  1 a hash.
-- ARGV  1 how long to keep it in ms, then field and number, as often as there are.
for i = 2, #ARGV, 2 do
    local known = redis.call('HGET', KEYS[1], ARGV[i])
    if not known or tonumber(known) < tonumber(ARGV[i + 1]) then
        redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
