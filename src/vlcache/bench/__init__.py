"""Benchmarks, and the random checkpoints that they and the tests run on."""
