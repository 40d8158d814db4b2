"""Benchmarks of the DTN layer, which cover time, memory traffic, host time and the GPU kernels' machine code."""
