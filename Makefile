.PHONY: check format quick test test-pythons test-oldest test-gpu gpu-report test-triton test-amx test-avx2 test-slow asan wheels release-check bench demo docs report notebooks reproduce

SCRIPTS = $(shell git ls-files '*.cpp' '*.h' '*.js')

check:
	ruff format --check .
	ruff check .
	clang-format --dry-run -Werror $(SCRIPTS)
	nice pyright

format:
	ruff format .
	clang-format -i $(SCRIPTS)

quick:
	pytest -q --quick -m "not gpu and not slow and not download"

test:
	pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow and not download"

# the quick tests under the other installed versions of Python
test-pythons:
	for python in python3.12 python3.13; do \
	  command -v $$python >/dev/null || { echo "no $$python here: skipped"; continue; }; \
	  $$python -m venv build/$$python && build/$$python/bin/pip install -q -e '.[test]' && \
	  build/$$python/bin/pytest -q --quick -m "not gpu and not slow and not download" || exit 1; \
	done

# the tests with the oldest libraries that pyproject.toml allows, but for torch, some of which warn
test-oldest:
	python3 -m venv build/oldest
	build/oldest/bin/pip install -q uv "$$(grep -o 'torch>=[^"]*' pyproject.toml)"
	build/oldest/bin/uv pip install -q --python build/oldest --resolution lowest-direct -e '.[test]'
	build/oldest/bin/pytest -n 2 --dist loadfile -o filterwarnings=default \
	  -m "not gpu and not slow and not download"

test-gpu:
	pytest -m gpu

# on a machine with an NVIDIA GPU: its properties, these tests and a benchmark, as a report to send us
gpu-report:
	python runs/gpu_report.py

# our Triton kernels without a GPU: values on Triton's interpreter, machine code for four GPU
# architectures. Slow; needs Triton (`pip install triton` in a separate environment)
test-triton:
	TRITON_INTERPRET=1 pytest tests/backends/triton tests/gpu/test_triton.py -m "not gpu and not slow"

test-slow:
	pytest -m slow

KERNEL_TESTS = tests/backends/native/test_model.py tests/backends/native/test_trained_attention.py \
  tests/backends/test_conformance.py tests/attack/test_kernels.py tests/attack/test_kernels_of_shapes.py

# the tests of the C++ kernels for Intel's matrix units (AMX), emulated: on a processor with AVX-512
# and bfloat16 but without AMX
test-amx:
	DIAGD_CXXFLAGS="-include '$(CURDIR)/tests/backends/native/emulated_tiles.h'" \
	pytest -k "native or kernels" $(KERNEL_TESTS) tests/backends/native/test_threads.py

# all CPU tests limited to AVX2, for PyTorch's kernels and ours
test-avx2:
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	DIAGD_CXXFLAGS=-march=x86-64-v3 $(MAKE) test

# the tests of the C++ kernels with address and undefined-behaviour sanitizers (whose allocator aborts
# when memory runs out, so one test is left out)
asan:
	DIAGD_CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 \
	pytest -p no:cacheprovider -k "(native or kernels) and not without_memory" $(KERNEL_TESTS)

# a wheel for each platform, with kernels, in dist/; needs the packages of [dev], no compiler
wheels:
	python runs/wheels.py

# what a release publishes for this platform, installed into fresh environments and run without a
# compiler, and every install line of the documentation; needs the packages of [dev], and downloads
# the dependencies anew
HERE = $(shell python -c "import runs.wheels; print(runs.wheels.this_platform())")
release-check:
	rm -rf build/release
	python runs/wheels.py --platforms $(HERE) --out build/release
	python -m build --sdist --outdir build/release
	python runs/release_check.py --dist build/release --install-lines

bench:
	bash runs/bench_cpu.sh

demo:
	diagd generate --compare

# the site, in build/site: needs the packages of [docs] and, for the report's PDF, Chromium
docs:
	python runs/site.py

# figures and tables of the technical report, from docs/results
report:
	python runs/report.py

# run the tutorials and keep their outputs: an hour; NAMES="your-own-model" runs one
notebooks:
	python runs/notebooks.py $(NAMES)

# list the published tables, or measure one again: make reproduce TABLE=rules
reproduce:
	python -m runs.reproduce $(TABLE)
