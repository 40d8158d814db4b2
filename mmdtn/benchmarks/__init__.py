"""Benchmarks of the DTN layer: time, memory traffic, host time, and the machine code of the GPU kernels."""
