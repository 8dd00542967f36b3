#!/usr/bin/env bash
# Runs a command beside a Redis server of its own, whose URL is in VLCACHE_REDIS_URL: with_redis.sh SERVER COMMAND...
set -euo pipefail
server=$1
shift
dir=$(mktemp -d)
"$server" --port 0 --unixsocket "$dir/redis.sock" --save "" --appendonly no --dir "$dir" >"$dir/log" &
pid=$!
trap 'kill $pid; wait $pid 2>/dev/null || true; rm -rf "$dir"' EXIT
for _ in $(seq 100); do
    [ -S "$dir/redis.sock" ] && break
    sleep 0.05
done
VLCACHE_REDIS_URL="unix://$dir/redis.sock" "$@"
