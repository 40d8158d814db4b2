"""Measurements of the DTN layer: time, memory traffic, host time, and what its GPU kernels are compiled to."""
