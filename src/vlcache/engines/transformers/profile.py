"""The profile that belongs to a loaded model: the one that is named, or the one in the model's directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import ConfigError
from vlcache.profile import PROFILE_NAME, Profile, read_profile

__all__ = ["find_profile"]


def find_profile(named: str, model: Any, layers: int, weights: WeightsWatch) -> Profile | None:
    """None where neither is there, and where the directory's is not this model's: somebody has changed its weights.

    Parameters
    ----------
    named : str
        A file; empty: look into the model's directory.

    Raises
    ------
    ConfigError
        A profile that cannot be read; a named one that was measured on another model.
    """
    home = getattr(model, "name_or_path", "")
    path = Path(named) if named else Path(home) / PROFILE_NAME
    if not named and not (home and path.is_file()):
        return None
    try:
        profile = read_profile(path)
        profile.check_model(weights.profile_fingerprint(), layers, str(path))
    except ConfigError as error:
        if named:
            raise
        warnings.warn(f"{error}; without it policies are cautious", stacklevel=2)
        return None
    return profile
