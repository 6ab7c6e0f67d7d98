# Every target makes its own virtual environment with pip when none is there.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.PHONY: help demo test check bench proto clean

help:
	@echo "make demo    start the service on the embedded model, replay 1,000 requests with and without the cache"
	@echo "make test    run the tests"
	@echo "make check   lint, format check, types"
	@echo "make bench   all benchmarks that need no GPU; results go to build/bench/"
	@echo "make proto   regenerate radixkv/v1 from proto/"

$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[all]'
	touch $@

demo: $(STAMP)
	mkdir -p build/demo
	$(PY) -m bench.replay --workload shared-prefix --requests 1000 --prefix-tokens 2048 --suffix-tokens 64 \
		--json build/demo/replay.json --plot build/demo/ttft.png

test: $(STAMP)
	$(PY) -m pytest

# Types are checked on the one import namespace that users see, laid out by links.
check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf build/types && mkdir -p build/types/radixkv
	ln -s $(CURDIR)/radixkv/* $(CURDIR)/kernels $(CURDIR)/service build/types/radixkv/
	ln -s $(CURDIR)/bench build/types/
	cd build/types && $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml -p radixkv -p bench

proto: $(STAMP)
	$(PY) -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/radixkv/v1/*.proto

clean:
	rm -rf build $(VENV)
