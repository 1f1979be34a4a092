.PHONY: check test test-gpu test-slow asan bench demo

check:
	ruff format --check .
	ruff check .
	pyright

test:
	pytest -m "not gpu and not slow and not download"

test-gpu:
	pytest -m gpu

test-slow:
	pytest -m slow

# the tests of the C++ kernels, built with checks of every access to memory and every overflow
asan:
	DIAGD_CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 \
	pytest -p no:cacheprovider -k "native or kernels" tests/backends/native/test_model.py \
	tests/backends/test_conformance.py tests/attack/test_kernels.py

bench:
	bash runs/bench_cpu.sh

demo:
	diagd generate --compare
