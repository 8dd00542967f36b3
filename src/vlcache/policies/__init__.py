"""The rules that say what is recomputed, one a file."""

from vlcache.policies.auto import Auto
from vlcache.policies.band import Band
from vlcache.policies.base import Check, Evidence, Look, Policy, Rule
from vlcache.policies.cacheblend import CacheBlend
from vlcache.policies.epic import Epic
from vlcache.policies.front import Layered, Prefix
from vlcache.policies.full import Full
from vlcache.policies.kvshare import KVShare
from vlcache.policies.mpic import Mpic
from vlcache.policies.none import NoRecompute
from vlcache.policies.parse import DEFAULT_POLICY, POLICIES, parse_policy
from vlcache.policies.random import RandomTokens
from vlcache.policies.repair import Repair
from vlcache.policies.verified import Verified

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Auto",
    "Band",
    "CacheBlend",
    "Check",
    "Epic",
    "Evidence",
    "Full",
    "KVShare",
    "Layered",
    "Look",
    "Mpic",
    "NoRecompute",
    "Policy",
    "Prefix",
    "RandomTokens",
    "Repair",
    "Rule",
    "Verified",
    "parse_policy",
]
