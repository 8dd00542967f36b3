"""`python -m vlcache` is `vlcache`."""

from vlcache.cli import main

main()
