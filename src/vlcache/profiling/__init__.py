"""Measuring a model's profile on calibration pairs: `vlcache profile`."""
