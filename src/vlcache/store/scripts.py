"""What has to happen on a Redis server at once, as scripts that it runs.

Keys are made from the arguments, so all of them live on one server (with replicas), not in a cluster.
"""

__all__ = ["FIND", "FORGET", "PLACE"]

# ARGV: prefix, seconds to live (0: for ever), members. Their heads ('' where there is none); uses are noted, and
# members whose head the server has lost are forgotten.
FIND = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local heads = {}
for i = 3, #ARGV do
    local key = ARGV[1] .. ARGV[i] .. ':head'
    local head = redis.call('GET', key)
    if head then
        redis.call('ZADD', ARGV[1] .. 'used', 'XX', now, ARGV[i])
        if tonumber(ARGV[2]) > 0 then redis.call('EXPIRE', key, ARGV[2]) end
    elseif redis.call('ZREM', ARGV[1] .. 'used', ARGV[i]) == 1 then
        redis.call('DECRBY', ARGV[1] .. 'held', redis.call('HGET', ARGV[1] .. 'sizes', ARGV[i]) or 0)
        redis.call('HDEL', ARGV[1] .. 'sizes', ARGV[i])
    end
    heads[#heads + 1] = head or ''
end
return heads
"""

# ARGV: prefix, seconds to live, capacity, size, member, head, members to spare. Makes room, least recently used first,
# and sets the head. Returns the heads that went, the member's old one first ('' if none); nothing if there is no room.
PLACE = """
local prefix, ttl, capacity, size, member = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local used, sizes, held = prefix .. 'used', prefix .. 'sizes', prefix .. 'held'
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local spared = {[member] = true}
for i = 7, #ARGV do spared[ARGV[i]] = true end
local before = tonumber(redis.call('HGET', sizes, member) or 0)
local need = tonumber(redis.call('GET', held) or 0) - before + size - capacity
local victims, at = {}, 0
while need > 0 do
    local some = redis.call('ZRANGE', used, at, at + 99)
    if #some == 0 then return false end
    for _, other in ipairs(some) do
        if need > 0 and not spared[other] then
            victims[#victims + 1] = other
            need = need - tonumber(redis.call('HGET', sizes, other) or 0)
        end
    end
    at = at + 100
end
local gone = {redis.call('GET', prefix .. member .. ':head') or ''}
for _, other in ipairs(victims) do
    local key = prefix .. other .. ':head'
    gone[#gone + 1] = redis.call('GET', key) or ''
    redis.call('DEL', key)
    redis.call('ZREM', used, other)
    redis.call('DECRBY', held, redis.call('HGET', sizes, other) or 0)
    redis.call('HDEL', sizes, other)
end
redis.call('ZADD', used, now, member)
redis.call('HSET', sizes, member, size)
redis.call('INCRBY', held, size - before)
if ttl > 0 then redis.call('SET', prefix .. member .. ':head', ARGV[6], 'EX', ttl)
else redis.call('SET', prefix .. member .. ':head', ARGV[6]) end
return gone
"""

# ARGV: prefix, member, head. Forgets an entry if its head is still this one.
FORGET = """
local key = ARGV[1] .. ARGV[2] .. ':head'
if redis.call('GET', key) ~= ARGV[3] then return 0 end
redis.call('DEL', key)
if redis.call('ZREM', ARGV[1] .. 'used', ARGV[2]) == 1 then
    redis.call('DECRBY', ARGV[1] .. 'held', redis.call('HGET', ARGV[1] .. 'sizes', ARGV[2]) or 0)
    redis.call('HDEL', ARGV[1] .. 'sizes', ARGV[2])
end
return 1
"""
