"""What runs a step of a model: our C++ kernels, or PyTorch eager, compiled or in CUDA graphs.

To write a backend, turn a `Transformer` into a `CausalModel` (`diagd/decoding/runner.py`: a cache
written by slot, `forward`, perhaps a faster `sample`) in a folder of its own, and give it a line in
the table in `prepare.py`. It must pass `tests/backends/conformance.py`: one more line there, in
`test_conformance.py`.
"""
