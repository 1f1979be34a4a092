"""Kernels for CUDA in Triton, which torch's CUDA wheels bring; nothing imports it elsewhere."""
