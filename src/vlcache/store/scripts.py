"""What has to happen on a Redis server at once, as scripts that it runs.

Keys are made from the arguments, so all of them live on one server (with replicas), not in a cluster.
"""

__all__ = ["FIND", "FORGET", "PLACE"]

# ARGV[1]: prefix. ARGV[2]: seconds to live, 0 for ever. A head is 8 bytes of length, JSON and a digest, see
# docs/entry-format.md.
_COMMON = """
local prefix, ttl = ARGV[1], tonumber(ARGV[2])
local used, sizes, held = prefix .. 'used', prefix .. 'sizes', prefix .. 'held'
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function head_key(member) return prefix .. member .. ':head' end

local function tensors(head)
    if #head < 40 then return {} end
    local sound, said = pcall(cjson.decode, string.sub(head, 9, #head - 32))
    if not sound or type(said) ~= 'table' then return {} end
    said['__metadata__'], said['head_digest'] = nil, nil
    return said
end

local function tensor_keys(member, head)
    local seal, keys = '', {}
    if #head < 40 then return keys end
    for i = #head - 31, #head - 24 do seal = seal .. string.format('%02x', string.byte(head, i)) end
    for name in pairs(tensors(head)) do keys[#keys + 1] = prefix .. member .. ':' .. seal .. ':' .. name end
    return keys
end

local function size_of(head)
    local last = 0
    for _, row in pairs(tensors(head)) do last = math.max(last, row['data_offsets'][2]) end
    return #head - 32 + last
end

local function unlink(keys)
    for _, key in ipairs(keys) do redis.call('UNLINK', key) end
end

local function live_on(member, head)
    local keys = tensor_keys(member, head)
    keys[#keys + 1] = head_key(member)
    for _, key in ipairs(keys) do
        if ttl > 0 then redis.call('EXPIRE', key, ttl) else redis.call('PERSIST', key) end
    end
    -- Last: a server that is full refuses what takes memory as a script's first write, and later no more
    redis.call('ZADD', used, now, member)
end

local function count_in(member, size)
    local before = redis.call('HGET', sizes, member) or 0
    redis.call('HSET', sizes, member, size)
    redis.call('INCRBY', held, size - before)
end

local function forget(member)
    local head, size = redis.call('GET', head_key(member)), redis.call('HGET', sizes, member)
    if head then
        unlink(tensor_keys(member, head))
        redis.call('DEL', head_key(member))
    end
    redis.call('ZREM', used, member)
    redis.call('HDEL', sizes, member)
    if size then redis.call('DECRBY', held, size) end
end

local function forget_expired()
    if ttl == 0 then return end
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', now - ttl * 1000000, 'LIMIT', 0, 100)) do
        if redis.call('EXISTS', head_key(member)) == 0 then forget(member) end
    end
end
"""

# ARGV: ..., members. Their heads, '' where there is none; those that are there live on.
FIND = (
    _COMMON
    + """
forget_expired()
local heads = {}
for i = 3, #ARGV do
    local head = redis.call('GET', head_key(ARGV[i]))
    if not head then
        forget(ARGV[i])
    else
        live_on(ARGV[i], head)
        if redis.call('HEXISTS', sizes, ARGV[i]) == 0 then count_in(ARGV[i], size_of(head)) end
    end
    heads[#heads + 1] = head or ''
end
return heads
"""
)

# ARGV: ..., capacity, size, member, head, 1 if it has K/V, members to spare. Makes room, the least recently used first,
# and sets the head of tensors that are there. Returns what became of it and how many went for it: 1 kept, 2 what is
# there says more, 0 no room, -1 a tensor is no longer there.
PLACE = (
    _COMMON
    + """
local capacity, size, member, head = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local mine = tensor_keys(member, head)
local old = redis.call('GET', head_key(member))
if old and ARGV[7] == '0' and tensors(old)['layer.000.key'] then
    if old ~= head then unlink(mine) end
    return {2, 0}
end
for _, key in ipairs(mine) do
    if redis.call('EXISTS', key) == 0 then return {-1, 0} end
end
forget_expired()
local spared = {[member] = true}
for i = 8, #ARGV do spared[ARGV[i]] = true end

local function need()
    local before = redis.call('HGET', sizes, member) or 0
    return tonumber(redis.call('GET', held) or 0) - before + size - capacity
end

local function make_room()
    local at, gone, missing = 0, {}, need()
    while missing > 0 do
        local some = redis.call('ZRANGE', used, at, at + 99)
        if #some == 0 then return nil end
        for _, other in ipairs(some) do
            if missing > 0 and not spared[other] then
                gone[#gone + 1] = other
                missing = missing - (redis.call('HGET', sizes, other) or 0)
            end
        end
        at = at + 100
    end
    return gone
end

local gone = make_room()
if not gone then
    -- The server may have lost some of what says who is there: count again
    redis.call('SET', held, 0)
    for _, other in ipairs(redis.call('HKEYS', sizes)) do
        if redis.call('EXISTS', head_key(other)) == 0 then
            redis.call('HDEL', sizes, other)
            redis.call('ZREM', used, other)
        else
            redis.call('ZADD', used, 'NX', 0, other)
            redis.call('INCRBY', held, redis.call('HGET', sizes, other))
        end
    end
    gone = make_room()
end
if not gone then
    if old ~= head then unlink(mine) end
    return {0, 0}
end
for _, other in ipairs(gone) do forget(other) end
if old and old ~= head then unlink(tensor_keys(member, old)) end
redis.call('SET', head_key(member), head)
count_in(member, size)
live_on(member, head)
return {1, #gone}
"""
)

# ARGV: ..., member, head. Forgets an entry if its head is still this one.
FORGET = (
    _COMMON
    + """
if redis.call('GET', head_key(ARGV[3])) ~= ARGV[4] then return 0 end
forget(ARGV[3])
return 1
"""
)
