# Every target makes the virtual environment if it is missing, and installs what it needs there.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed-all

# The most minutes that `make demo` takes once everything is installed.
DEMO_MINUTES ?= 5

.PHONY: help demo gateway-demo fleet-demo test test-long install-matrix stress exact campaign soak mutants check bench gpu proto clean

help:
	@echo "make demo      ask a small model questions about a document, with and without the cache; draw build/demo/ttft.png;"
	@echo "               at most $(DEMO_MINUTES) minutes (DEMO_MINUTES=N), after installing $(SIZE_demo)"
	@echo "make gateway-demo  two servers behind the SMG gateway, OpenAI's client, and a server that is killed; 20 seconds,"
	@echo "               after installing $(SIZE_gateway-demo)"
	@echo "make fleet-demo  a fleet of two on Ray, and a replica that is killed; 2 minutes, after installing $(SIZE_fleet-demo)"
	@echo
	@echo "The targets below install $(SIZE_all)."
	@echo "make test      run the tests: about 12 minutes on two cores"
	@echo "make test-long run the tests that \`make test\` leaves out, since they take long for what they prove: more random"
	@echo "               cases, benchmarks, gateways and routers of other projects; about 12 minutes on two cores"
	@echo "make check     lint, format check, types"
	@echo "make install-matrix  install each set of extras that the docs name into a clean environment, and use it; about an"
	@echo "               hour, or some of them: SETS=\"'' engine engine,text engine@oldest\""
	@echo "make stress    random walks against oracles: STEPS=1000000 of the cache, ENGINE_SEEDS=2000 of the engine, SEED=0"
	@echo "make exact     does a hit change a bit? CASES=1000 for each dtype of model and pool"
	@echo "make campaign  CALLS=50000 real calls that are cancelled, late or killed: nothing leaks, no answer is wrong"
	@echo "make soak      MINUTES=60 of mixed calls next to a Redis that is restarted: memory does not grow after 10 minutes, no"
	@echo "               answer is wrong, everything is returned"
	@echo "make mutants   break cache and engine in small ways: a test must fail each time; about 20 minutes"
	@echo "make bench     replay, rpc, batching, bookkeeping and step_gap, into build/bench/; with TRACE=FILE also tree and the trace's replay"
	@echo "make gpu       on a GPU, into build/gpu/: PART=product, look (two minutes), prefill, kernels or peers (nine minutes each)"
	@echo "make proto     regenerate radixkv/v1 and radixkv/gateway from proto/"
	@echo
	@echo "make clean     remove build/ and $(VENV)"
	@echo
	@echo "Sizes are those with PyTorch's CPU build. On Linux pip's default build brings several GB of CUDA libraries;"
	@echo "TORCH_INDEX_URL=URL, the index that PyTorch's installation page names for CPUs, avoids them."
	@echo "PIP_ARGS=... passes other arguments to pip install."

# What a target installs: extras of pyproject.toml, and the size of the whole environment with them (du -sh).
EXTRAS_demo         := engine,plot,text
EXTRAS_gateway-demo := engine,gateway
EXTRAS_fleet-demo   := ray
EXTRAS_all          := all
SIZE_demo         := 1.3 GB
SIZE_gateway-demo := 1.4 GB
SIZE_fleet-demo   := 1.7 GB
SIZE_all          := 3 GB

PIP_INSTALL = PIP_ROOT_USER_ACTION=ignore $(PY) -m pip install --disable-pip-version-check --no-warn-script-location \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) $(PIP_ARGS)

# pip shows its progress; its warnings are kept in a file, and shown where it fails. The kernels are compiled here, so that the first server starts as quickly as the next ones.
$(VENV)/.installed-%: pyproject.toml
	@echo "installing radixkv[$(EXTRAS_$*)] into $(VENV), once, for some minutes:"
	@echo "$(SIZE_$*) with PyTorch's CPU build (see make help)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --editable '.[$(EXTRAS_$*)]' 2> $@.log || { cat $@.log >&2; exit 1; }
	@echo "compiling kernels for this processor, where it has a compiler: about a minute"
	@$(PY) -c 'from radixkv.model.on_cpu import native_library; native_library()'
	@touch $@

# `all` has what the demos of one machine need.
installed = $(or $(wildcard $(STAMP)),$(VENV)/.installed-$(1))

demo: $(call installed,demo)
	@echo "demo: questions about a document, with the cache and without it: at most $(DEMO_MINUTES) minutes"
	@mkdir -p build/demo
	@$(PY) -m bench.demo --time-limit-s $$(( $(DEMO_MINUTES) * 60 )) --json build/demo/replay.json --plot build/demo/ttft.png

gateway-demo: $(call installed,gateway-demo)
	@$(PY) -m bench.gateway_demo

fleet-demo: $(VENV)/.installed-fleet-demo
	@$(PY) -m bench.fleet.demo

# One more than the number of cores, since tests wait for servers, and at most four.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))

# Test files run in parallel. A worker that dies ends the run. Idle OpenMP threads must not spin, since they share the
# cores with other workers: spinning makes tests with two threads three times as slow.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0
test: $(STAMP)
	$(PYTEST) -m "not slow and not long"

test-long: $(STAMP)
	$(PYTEST) -m "long and not slow"

# '' in SETS is the package without extras, `engine@oldest` installs the oldest versions that pyproject.toml allows.
install-matrix:
	$(PYTHON) -m tests.install.matrix $(SETS)

STEPS ?= 1000000
ENGINE_SEEDS ?= 2000
SEED  ?= 0
stress: $(STAMP)
	$(PY) -m tests.cache.walk.cache_walk --steps $(STEPS) --seed $(SEED)
	$(PY) -m tests.engine.simulation.engine_walk --seeds $(ENGINE_SEEDS) --seed $(SEED)

CASES ?= 1000
exact: $(STAMP)
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype float32
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype float32 --kv-dtype bf16
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --kv-dtype fp8
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --kv-dtype int8
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --kv-dtype int4

CALLS ?= 50000
campaign: $(STAMP)
	$(PY) -m tests.whole.campaign --calls $(CALLS) --seed $(SEED)

MINUTES ?= 60
soak: $(STAMP)
	$(PY) -m tests.whole.soak --minutes $(MINUTES) --warm-up-minutes $$(( $(MINUTES) < 20 ? $(MINUTES) / 2 : 10 )) --seed $(SEED)

mutants: $(STAMP)
	$(PY) -m tests.mutants.mutation_check

# TRACE is any file that `radixkv simulate` reads.
bench: $(STAMP)
	mkdir -p build/bench
	$(PY) -m bench.replay --workload shared-prefix --groups 8 --requests 400 --prefix-tokens 1024 --suffix-tokens 64 \
		--json build/bench/shared_prefix.json --plot build/bench/shared_prefix.png
	$(PY) -m bench.rpc --json build/bench/rpc.json
	$(PY) -m bench.batching --json build/bench/batching.json
	$(PY) -m bench.bookkeeping --layers 4 --rounds 3 --json build/bench/bookkeeping.json
	$(PY) -m bench.step_gap --json build/bench/step_gap.json
ifdef TRACE
	$(PY) -m bench.tree --trace $(TRACE) --json build/bench/tree.json
	$(PY) -m bench.replay --workload mooncake --trace $(TRACE) --limit 300 --scale 0.05 --concurrency 1 \
		--set cache.capacity_tokens=524288 --json build/bench/mooncake.json
endif

# PART is product, look, prefill, kernels or peers; all of them if it is not given. SGLANG is a folder with SGLang's unpacked
# wheel. Without make: python -m bench.gpu, which needs no installation.
gpu: $(STAMP)
	$(PY) -m bench.gpu --out build/gpu $(if $(PART),--part $(PART)) $(if $(SGLANG),--sglang $(SGLANG))

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p radixkv -p bench

proto: $(STAMP)
	$(PY) -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/radixkv/v1/*.proto proto/radixkv/gateway/*.proto

clean:
	rm -rf build $(VENV)
