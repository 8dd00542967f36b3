"""A new picture every request, for long: the store keeps to its bound and the process does not grow."""

from __future__ import annotations

import os

import psutil
from conftest import Lab, make_picture

from vlcache import VLCache
from vlcache.bench.checkpoints import Shape, build_model, build_processor
from vlcache.store import MemoryStore

# Few weights, much K/V: 1.2 MB for a picture of 64 tokens
WIDE = Shape("qwen2_5_vl", 512, 64, 4, 8, 8, 64, (8, 12, 12), 1, 32, 64, 2, (0,), vocabulary=320, tied=False)
BOUND = 64 * 10**6


def test_two_hundred_pictures_through_64_mb() -> None:
    processor = build_processor(WIDE)
    lab = Lab("wide", build_model(WIDE, processor.tokenizer), processor)
    store, process, rss = MemoryStore(BOUND), psutil.Process(os.getpid()), []
    with VLCache(lab.model, processor, store=store, prefix_gb=0.02) as cache:
        for seed in range(200):
            inputs = cache.prefill(lab.chat(make_picture(seed, 224, 224), "q"))
            lab.model.generate(**inputs, max_new_tokens=2, min_new_tokens=2)
            stats = store.stats()
            assert stats.held_bytes <= BOUND
            assert cache._corridor.prefixes.held_bytes <= 20 * 10**6
            rss.append(process.memory_info().rss)
    assert stats.puts == 200
    assert stats.evictions > 140
    before, after = max(rss[90:110]), max(rss[180:])
    print(
        f"store {stats.held_bytes / 1e6:.1f} of 64 MB; RSS {before / 1e6:.1f} MB, 90 pictures later {after / 1e6:.1f}"
    )
    assert after - before < 8 * 10**6
