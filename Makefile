# make build    everything: Debian packages, .venv, compiled, .venv/bin/shardsmith in place
# make test     every test but the long ones          make test-long   the long ones
# make demo     fine-tunes a small model, kills it, resumes, exports; leaves out/demo
# make bench    measures                              make sanitize    core tests under sanitizers
# make fuzz     the fuzzers, FUZZ_SECONDS=60 for each reader of files
# make format   make format-check   make clean
.PHONY: build setup models test test-long demo bench sanitize fuzz format format-check clean
SHELL := /bin/bash

build: setup
	@scripts/build

setup:
	@scripts/setup

models: setup
	@scripts/fetch-models

test: build models
	@.venv/bin/python scripts/test.py

test-long: build models
	@.venv/bin/python scripts/test.py --long

demo: build models
	@.venv/bin/python -m shardsmith.demo

bench: build models
	@.venv/bin/python bench/train.py

sanitize: setup
	@scripts/sanitize

FUZZ_SECONDS ?= 60
fuzz: setup
	@scripts/fuzz $(FUZZ_SECONDS)

format:
	@scripts/format

format-check:
	@scripts/format --check

# The environment and the downloads stay.
clean:
	rm -rf build python/shardsmith/*.so
