# `make help` lists what there is. Every target sets up what it needs.
ifndef PYTHON
PYTHON := $(shell command -v python3.11 || command -v python3)
endif
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo setup doctor lint types unit check integration test test-slurm test-native test-gpu-offline bench quality fuzz format wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:  ## make .venv with the verified stack (VARIANT=cpu|cuda: by default what .venv is for; PYTHON=...)
	@"$(PYTHON)" setup_env.py $(VARIANT)

demo: setup  ## the whole way once, on synthetic data; DATA=path/to/ml-1m for MovieLens-1M
	python -m pipelines.demo $(if $(DATA),--data "$(DATA)")

doctor: $(if $(wildcard .venv/bin/python),,setup)  ## check versions, FBGEMM, a sharded table on two ranks, the machine
	python -m fuxi_torchrec.doctor

check: lint types unit  ## lint, types, unit tests, doctests

test: check integration  ## everything: check, then the integration tests

lint: setup  ## ruff: rules and format
	ruff check .
	ruff format --check .

types: setup  ## mypy
	mypy

unit: setup  ## unit tests and doctests, one thread on each core
	OMP_NUM_THREADS=1 pytest -n auto --maxprocesses 8 fuxi_torchrec pipelines benchmarks

integration: setup  ## several processes, real TorchX launches; two files at a time, in their order: long ones come early
	OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile --no-loadscope-reorder integration_tests

test-slurm: setup  ## a real Slurm on this machine alone, and a job through it (root, Debian; not part of test)
	integration_tests/slurm/run.sh

test-native: setup  ## the native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (not part of test)
	python -m fuxi_torchrec.ops.native.build --sanitize --output build/sanitized/kernels.so
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	OMP_NUM_THREADS=1 pytest -n 0 --kernels build/sanitized/kernels.so \
	fuxi_torchrec/ops/tests/test_backends.py fuxi_torchrec/encoders/tests/test_native.py -k "not other_sources" \
	fuxi_torchrec/encoders/tests/test_goldens.py fuxi_torchrec/encoders/tests/test_native_operators.py

test-gpu-offline:  ## the GPU kernels without a GPU: interpreted, on a pretend device, compiled; makes .venv-gpu
	@"$(PYTHON)" setup_env.py gpu-offline
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-gpu/bin/python -m pytest -n 2 fuxi_torchrec/ops/triton \
	fuxi_torchrec/encoders/tests/test_compile.py
	OMP_NUM_THREADS=1 .venv-gpu/bin/python -m benchmarks.gpu_kernels --quick

bench: setup  ## all benchmarks, into benchmarks/RESULTS.md (an hour on an idle machine)
	python -m benchmarks

fuzz: setup  ## damage every file and request that is read, some minutes; CASES of each format, SEED
	OMP_NUM_THREADS=1 python -m benchmarks.fuzz --cases $(or $(CASES),40) --seed $(or $(SEED),0)

quality: setup  ## a short training on MovieLens-1M against a recorded floor; DATA=path/to/ml-1m, else fetched
	python -m benchmarks.gate $(if $(DATA),--data "$(DATA)")

format: setup  ## rewrite the sources the way ruff wants them
	ruff check --fix .
	ruff format .

wheel: setup  ## build dist/*.whl: one with the native kernels, for this platform, and a pure one
	python -m build --wheel --no-isolation
	python -m build --wheel --no-isolation -C--build-option=--pure

clean:  ## remove .venv, caches and builds
	rm -rf .venv .venv-gpu build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
