# Every target creates the virtual environment if it is missing, and installs its requirements there.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed-all

# Maximum minutes of `make demo` after the installation.
DEMO_MINUTES ?= 5

.PHONY: help demo gateway-demo fleet-demo test test-long install-matrix release stress exact campaign soak mutants check bench vllm-tier gpu proto clean

help:
	@echo "make demo      ask a small model questions about a document, with and without the cache; draw build/demo/ttft.png;"
	@echo "               at most $(DEMO_MINUTES) minutes (DEMO_MINUTES=N), after installing $(SIZE_demo)"
	@echo "make gateway-demo  run two servers behind the SMG gateway, call them with OpenAI's client and kill a server;"
	@echo "               20 seconds, after installing $(SIZE_gateway-demo)"
	@echo "make fleet-demo  run a fleet of two replicas on Ray and kill one; 2 minutes, after installing $(SIZE_fleet-demo)"
	@echo
	@echo "The targets below install $(SIZE_all)."
	@echo "make test      run the tests: 7 to 15 minutes on two cores, depending on the processor"
	@echo "make test-long run slower tests, which \`make test\` leaves out: more random cases, benchmarks, gateways and routers"
	@echo "               of other projects; 8 to 15 minutes on two cores"
	@echo "make check     lint, format check, types"
	@echo "make install-matrix  install each documented set of extras into a clean environment, and use it; about an hour,"
	@echo "               or only some sets: SETS=\"'' engine engine,text engine@oldest\""
	@echo "make release   build and check the wheel and the sdist of the last commit, with digests and provenance, into dist/"
	@echo "make stress    compare random walks with oracles: STEPS=1000000 of the cache, ENGINE_SEEDS=2000 of the engine, SEED=0"
	@echo "make exact     check that a hit never changes a bit: CASES=1000 for each dtype of model and pool, and"
	@echo "               for each format of quantized weights"
	@echo "make campaign  make CALLS=50000 calls that are cancelled, late or killed, and check for leaks and wrong responses"
	@echo "make soak      make mixed calls for MINUTES=60 while a Redis is restarted, and check that memory does not grow after"
	@echo "               10 minutes, no response is wrong and everything is freed"
	@echo "make mutants   change the code in small ways, and check that a test fails each time; some hours"
	@echo "make bench     run replay, rpc, batching, bookkeeping and step_gap, into build/bench/; with TRACE=FILE also tree and a"
	@echo "               replay of the trace"
	@echo "make vllm-tier run vLLM's CPU build, which is installed once, with our disk tier: restarts, and KILLS=100 kills; 40"
	@echo "               minutes, into build/bench/"
	@echo "make gpu       run on a GPU, into build/gpu/: PART=product, look (two minutes), prefill, kernels or peers (nine minutes"
	@echo "               each)"
	@echo "make proto     regenerate radixkv/v1 and radixkv/gateway from proto/"
	@echo
	@echo "make clean     remove build/ and $(VENV)"
	@echo
	@echo "Sizes are those with PyTorch's CPU build. On Linux, pip's default build includes several GB of CUDA libraries. To"
	@echo "avoid them, set TORCH_INDEX_URL to the index that PyTorch's installation page names for CPUs."
	@echo "PIP_ARGS=... passes other arguments to pip install."

# Extras of pyproject.toml that a target installs, and the size of the whole environment with them (du -sh).
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

# pip shows its progress. Its warnings are stored in a file, which is shown if the installation fails. The kernels are
# compiled here, so that the first start of a server is not slower.
$(VENV)/.installed-%: pyproject.toml
	@echo "installing radixkv[$(EXTRAS_$*)] into $(VENV), once, for some minutes:"
	@echo "$(SIZE_$*) with PyTorch's CPU build (see make help)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --editable '.[$(EXTRAS_$*)]' 2> $@.log || { cat $@.log >&2; exit 1; }
	@echo "compiling kernels for this processor, if there is a compiler: about a minute"
	@$(PY) -c 'from radixkv.model.on_cpu import native_library; native_library()'
	@touch $@

# `all` includes the extras of `demo` and `gateway-demo`.
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

# Test files run in parallel. If a worker dies, the run ends. Idle OpenMP threads must not spin, because they share the
# cores with other workers: with spinning, tests with two threads take three times as long. Compiled bytecode is kept, also
# where the environment says otherwise: hundreds of servers and commands are started.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0
test: $(STAMP)
	$(PYTEST) -m "not slow and not long"

test-long: $(STAMP)
	$(PYTEST) -m "long and not slow"

release:
	$(PYTHON) -m tests.install.release

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
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --kv-dtype k8v4
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --weights q8
	$(PY) -m tests.model.exact.exact_cases --cases $(CASES) --dtype bfloat16 --weights q4

CALLS ?= 50000
campaign: $(STAMP)
	$(PY) -m tests.whole.campaign --calls $(CALLS) --seed $(SEED)

MINUTES ?= 60
soak: $(STAMP)
	$(PY) -m tests.whole.soak --minutes $(MINUTES) --warm-up-minutes $$(( $(MINUTES) < 20 ? $(MINUTES) / 2 : 10 )) --seed $(SEED)

mutants: $(STAMP)
	$(PY) -m tests.mutants.mutation_check

# TRACE is a trace file for `radixkv simulate`.
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

KILLS ?= 100
PROMPTS ?= 1000
vllm-tier: $(STAMP)
	mkdir -p build/bench
	$(PY) -m bench.vllm_tier --prompts $(PROMPTS) --kills $(KILLS) --json build/bench/vllm_tier.json

# PART is product, look, prefill, kernels or peers; by default all of them run. SGLANG is a folder with SGLang's unpacked
# wheel. Without make, run python -m bench.gpu, which needs no installation.
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
