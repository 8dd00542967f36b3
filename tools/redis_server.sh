#!/usr/bin/env bash
# A redis-server for the tests at DIR/redis-server: the system's own, or Debian's package unpacked into DIR, not installed.
set -euo pipefail
dir=$1
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
if found=$(command -v redis-server || command -v valkey-server); then
    ln -sf "$found" "$dir/redis-server"
    exit
fi
if ! command -v apt-get >/dev/null; then
    echo "no redis-server and no apt-get: install redis-server or valkey-server, then make again" >&2
    exit 1
fi
cd "$dir"
packages=(redis-server redis-tools liblzf1 libjemalloc2)
apt-get download -qq "${packages[@]}" 2>/dev/null || { apt-get update -qq && apt-get download -qq "${packages[@]}"; }
for package in *.deb; do
    dpkg-deb --extract "$package" root
    rm "$package"
done
library=$(dirname "$(find "$dir/root" -name 'liblzf.so*' | head -n 1)")
printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' "$library" "$dir/root/usr/bin/redis-server" >redis-server
chmod +x redis-server
./redis-server --version >/dev/null
