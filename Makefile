.PHONY: check test test-gpu test-slow bench demo

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

bench:
	bash runs/bench_cpu.sh

demo:
	diagd generate --compare
