# `make setup` then anything else; each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL ?= models/penstock-tiny
# More than there are cores: tests wait about as long as they compute.
TEST_PROCESSES ?= 5

# Tests and servers start many processes; compiling every module again in each of them costs a sixth of their start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve demo test test-fast test-deep test-failed test-bucket test-costs lint types proto check-proto client simulate validate-simulator bench bench-router bench-serving bench-bulk bench-modes bench-stages bench-transfer bench-pull bench-store bench-retention bench-agents bench-replay bench-overload bench-faults bench-startup bench-kept bench-autoscale bench-flips bench-engine bench-vllm bench-steps bench-structured bench-schemas bench-lora bench-speculation bench-quantized conformance attack soak gpu-check gpu-resume results docs tune clean

help:
	@echo "make demo           set up, start 1 prefill + 2 decode workers, stream prompts, stop"
	@echo "make serve          set up, serve $(MODEL) until Ctrl-C        (MODEL=DIR for another)"
	@echo "make test           set up, run the whole test suite (about nine minutes on two quiet cores)"
	@echo "make test-fast      every test that starts no process and no Ray and is not slow: 90 s on two cores"
	@echo "make test-deep      every property test with ten times the examples, other ones in each run; 504 kills of a worker"
	@echo "make test-bucket    the shared store in a bucket, at moto's server, installed into .venv-s3"
	@echo "make test-costs     the whole suite, recording what each file costs, by which later runs order them"
	@echo "make setup          a virtual environment in .venv, which every other target makes where it is missing"
	@echo "make lint types     ruff, mypy"
	@echo "make proto          regenerate the gRPC stubs from proto/            (make check-proto: are they?)"
	@echo "make client         regenerate the blocking client from the asyncio one"
	@echo "make bench bench-router bench-serving bench-transfer   benchmarks, results in benchmarks/results/"
	@echo "make bench-engine   one engine beside the bare-torch floor, eager torch, transformers and, where named, vLLM  (ISA=avx2)"
	@echo "make bench-vllm     bench-engine and bench-serving beside vLLM, installed into .venv-vllm from pinned wheels"
	@echo "make bench-quantized   products with int8, int4 and fp8 weights on a CPU beside bf16; what quantization does to answers"
	@echo "make bench-bulk     interactive requests with and without a large offline batch beside them"
	@echo "make bench-stages   where the time to first token goes, with prompts computed remotely, split and locally"
	@echo "make bench-modes    disaggregated against colocated at equal cores over loads and SLOs; writes docs/modes.md"
	@echo "make bench-retention  hit shares of orders of eviction on recorded traces"
	@echo "make bench-pull     pulling a prefix from another worker beside computing it, over prefix lengths and link speeds"
	@echo "make bench-store    reading a prefix from the shared store beside computing it, over prefix lengths and storages"
	@echo "make bench-agents   agents' sessions in virtual time: hits, time to first token by turn, bytes moved"
	@echo "make bench-replay   every policy on every trace in virtual time   (PENSTOCK_TRACES=DIR for recorded ones)"
	@echo "make bench-overload every policy beyond the capacity, in virtual time; writes docs/overload.md"
	@echo "make bench-faults   workers, routers, a node and the controller killed or frozen: noticed when, replaced when"
	@echo "make bench-startup  a worker cold, from a spare, after a kill and a freeze; weights loaded first and shared"
	@echo "make bench-kept     from the kill of a worker to the next token of its stream, with its KV kept and recomputed"
	@echo "make bench-autoscale   the autoscaler beside one that goes by queue lengths, in virtual time"
	@echo "make bench-simulator   simulated requests a second, reports waiting or sent; -scale: 1,000 workers, a million requests"
	@echo "make bench-flips    50 role flips, scale-downs and restarts under load, every token compared"
	@echo "make bench-structured   what a grammar costs a stream, and the steps that forced tokens save"
	@echo "make bench-schemas  outputs against the schemas of two public suites, also while a worker is killed; downloads them with pip once"
	@echo "make bench-lora     what adapters cost a decode step of 64 sequences, and how long one takes to load"
	@echo "make bench-speculation  what verifying tokens costs, and what speculation gains by batch and kind of text"
	@echo "make bench-steps    what a decode step costs besides the model, at batches of 1 to 256"
	@echo "make conformance    schemathesis, LangChain's tests, lm-eval and GuideLLM against a deployment, installed into .venv-conformance"
	@echo "make attack         every attack of docs/security.md against a running deployment: held or not, at what cost to others"
	@echo "make soak           half an hour of faults, slow readers, bad input and cancellations; nothing may grow  (MINUTES=N)"
	@echo "make simulate       thousands of seeded faults in virtual time, every invariant checked   (SEEDS=N)"
	@echo "make simulate-scale  1,000 workers and a million requests in virtual time   (WORKERS=N REQUESTS=N)"
	@echo "make validate-simulator   predicted against measured on this machine: five workloads, a stalled link, a kill"
	@echo "make gpu-check      tests marked gpu and the GPU benchmarks (no network, no Ray)"
	@echo "make gpu-resume     the GPU benchmarks that gpu-check had no time for"
	@echo "make results        collect benchmarks/results/ as docs/results.md with charts (measures nothing)"
	@echo "make docs           build the documentation as a site in build/site, in an environment of its own (.venv-docs)"
	@echo "make tune           measure the attention kernels' tiles on the GPU at hand and keep the fastest"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[serve,bench,nixl,tracing,test]"
	touch $@

serve: setup
	$(PY) -m cluster.cli serve --model $(MODEL)

demo: setup
	$(PY) -m cluster.cli demo --model $(MODEL)

# Each free process takes the dearest file that is left (tests/support/suite/costs.py).
PYTEST := $(PY) -m pytest -q --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup
	@mkdir -p build
	$(PYTEST); status=$$?; echo $$status > build/test-status; exit $$status

test-fast: setup
	$(PYTEST) -m "not processes and not slow"

# Six kills for each unit of depth.
test-deep: setup
	PENSTOCK_TEST_DEPTH=10 $(PYTEST) --hypothesis-profile explore -m hypothesis
	PENSTOCK_TEST_DEPTH=84 $(PY) -m pytest -q tests/worker/test_kept_kills.py

# One process, so that nothing but the machine itself is beside them.
test-failed: setup
	$(PY) -m pytest -q --numprocesses 0 --last-failed --last-failed-no-failures none

# The packages of .venv, and two more that no other test needs.
S3 := .venv-s3
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(S3)/.installed: tests/worker/store/requirements.txt $(STAMP)
	test -x $(S3)/bin/python || $(PYTHON) -m venv $(S3)
	$(PY) $(SITE_PACKAGES) > $$($(S3)/bin/python $(SITE_PACKAGES))/penstock.pth
	$(S3)/bin/python -m pip install --quiet --requirement $<
	touch $@

test-bucket: $(S3)/.installed
	$(S3)/bin/python -m pytest -q tests/worker/store/test_bucket.py

test-costs: setup
	$(PYTEST) --record-costs

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

proto: setup
	$(PY) -m tests.support.repository.stubs --write

check-proto: setup
	$(PY) -m tests.support.repository.stubs

client: setup
	$(PY) -m tests.support.repository.blocking_client --write

SEEDS ?= 5000

simulate: setup
	$(PY) -m simulator.check --seeds $(SEEDS)

# Virtual time at scale, and how fast it is.
.PHONY: simulate-scale bench-simulator bench-simulator-scale
WORKERS ?= 1000
REQUESTS ?= 1000000

simulate-scale: setup
	$(PY) -m simulator.scale --workers $(WORKERS) --requests $(REQUESTS)

# Three rounds of two shapes of deployment, three to four minutes each, on an idle machine.
validate-simulator: setup
	for shape in disaggregated colocated; do $(PY) -m benchmarks.validation --shape $$shape || exit 1; done

bench: setup
	$(PY) -m benchmarks.serving.latency

# Two cores: one for the router, the other for null worker and clients. Decisions and index first, as they stand.
bench-router: setup
	for name in router.index router.choice router.observing router.http_streams router; do $(PY) -m benchmarks.$$name || exit 1; done

bench-engine: setup
	$(PY) -m benchmarks.engine $(if $(ISA),--isa $(ISA))

bench-quantized: setup
	$(PY) -m benchmarks.engine.quantized_cpu
	$(PY) -m benchmarks.engine.quality

# vLLM's pins are not ours. torch comes first, so that only this one is looked for in that index.
VLLM := .venv-vllm
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

$(VLLM)/.installed: benchmarks/common/vllm-requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --extra-index-url $(TORCH_CPU_INDEX) $$(grep '^torch==' $<)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

bench-vllm: setup $(VLLM)/.installed
	$(PY) -m benchmarks.engine --vllm-python $(VLLM)/bin/python
	$(PY) -m benchmarks.serving --vllm-python $(VLLM)/bin/python

bench-serving: setup
	$(PY) -m benchmarks.serving

bench-bulk: setup
	$(PY) -m benchmarks.serving.bulk

bench-stages: setup
	$(PY) -m benchmarks.serving.stages

# Most of an hour. With vLLM beside it: make bench-modes MODES="--vllm-python .venv-vllm/bin/python"
bench-modes: setup
	$(PY) -m benchmarks.modes $(MODES)

bench-replay: setup
	$(PY) -m benchmarks.router.replay

bench-overload: setup
	$(PY) -m benchmarks.overload

bench-faults: setup
	$(PY) -m benchmarks.cluster.faults

bench-startup: setup
	$(PY) -m benchmarks.cluster.startup
	$(PY) -m benchmarks.engine.weights

bench-kept: setup
	$(PY) -m benchmarks.cluster.kept

bench-simulator: setup
	$(PY) -m benchmarks.simulator

bench-simulator-scale: setup
	$(PY) -m benchmarks.simulator.scale --workers $(WORKERS) --requests $(REQUESTS)

bench-autoscale: setup
	$(PY) -m benchmarks.autoscale

bench-flips: setup
	$(PY) -m benchmarks.cluster.flips

bench-steps: setup
	for name in steps steps.determinism; do $(PY) -m benchmarks.$$name || exit 1; done

bench-structured: setup
	$(PY) -m benchmarks.engine.structured

bench-schemas: setup
	$(PY) -m benchmarks.schemas

bench-lora: setup
	$(PY) -m benchmarks.engine.adapters

# Most of ten minutes; ONLY="batch 16" measures the workloads whose names contain it and keeps the others.
bench-speculation: setup
	$(PY) -m benchmarks.engine.speculation --only "$(ONLY)"

bench-transfer: setup
	$(PY) -m benchmarks.transfer

# About two minutes; the traces are in the folder that PENSTOCK_TRACES names.
bench-retention: setup
	$(PY) -m benchmarks.engine.retention

# Likewise, ten minutes.
bench-agents: setup
	$(PY) -m benchmarks.router.agents

bench-pull: setup
	$(PY) -m benchmarks.transfer.pulls
	$(PY) -m benchmarks.transfer.pulls --role prefill

bench-store: setup
	$(PY) -m benchmarks.transfer.stored

# About eight minutes on two cores. ATTACKS names some of the table, `python -m benchmarks.attack --list` all.
# The suites' pins are not ours, so they have an environment of their own.
CONFORMANCE := .venv-conformance
$(CONFORMANCE)/.installed: tests/conformance/requirements.txt
	test -x $(CONFORMANCE)/bin/python || $(PYTHON) -m venv $(CONFORMANCE)
	$(CONFORMANCE)/bin/python -m pip install --quiet --requirement $<
	touch $@

conformance: setup $(CONFORMANCE)/.installed
	$(PY) -m tests.conformance --venv $(CONFORMANCE) --file benchmarks/results/conformance.json

attack: setup
	$(PY) -m benchmarks.attack $(ATTACKS)

MINUTES ?= 30

soak: setup
	$(PY) -m benchmarks.attack.soak --minutes $(MINUTES)

# With whatever python3 has: torch, triton, and the few packages that engine/ and penstock/ import (docs/gpu-check.md).
# Ten minutes in all. The benchmarks run also where a test fails, and keep what they have wherever they end.
# `make gpu-resume` runs the sections that have not begun yet, in ten minutes more: repeat it until none is left.
GPU_TESTS := tests/kv_transfer/transports/test_cuda_ipc.py tests/engine/step/test_on_gpu.py tests/engine/kernels/test_library_attention.py tests/engine/kernels/test_large_pools.py tests/engine/kernels/test_paged_kernels.py tests/engine/kernels/test_ops_kernels.py tests/engine/kernels/test_sample_kernel.py tests/engine/kernels/test_page_checksum.py \
	tests/engine/kernels/test_latent_kernel.py tests/engine/kernels/products tests/engine/cache/test_host_tier.py \
	tests/engine/cache/test_tier_model.py tests/engine/weights/test_file_readers.py \
	tests/engine/step/test_graphs.py
GPU_TEST_SECONDS ?= 150
GPU_BENCH_SECONDS ?= 350
GPU_RESULTS ?= benchmarks/results

gpu-resume:
	TRITON_INTERPRET=0 timeout 590 python3 -m benchmarks.gpu --resume --seconds 520 --results $(GPU_RESULTS)

gpu-check:
	@failed=0; \
	side_by_side=$$(python3 -c "import xdist" 2>/dev/null && echo "--numprocesses 8"); \
	TRITON_INTERPRET=0 timeout $(GPU_TEST_SECONDS) python3 -m pytest -q -p no:cacheprovider $$side_by_side -m gpu $(GPU_TESTS) || failed=1; \
	TRITON_INTERPRET=0 timeout $$(($(GPU_BENCH_SECONDS) + 60)) python3 -m benchmarks.gpu --seconds $(GPU_BENCH_SECONDS) --results $(GPU_RESULTS) || failed=1; \
	exit $$failed

results: setup
	$(PY) -m benchmarks.common.results_page

# The site's environment: the extra `docs` alone, pinned, and mermaid for diagrams where npm is. Building needs no network.
DOCS := .venv-docs
MERMAID := 11.17.2
$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material
	if command -v npm >/dev/null; then npm install --silent --no-save --prefix $(DOCS) mermaid@$(MERMAID); fi
	touch $@

docs: $(DOCS)/.installed
	PENSTOCK_DOCS_MERMAID=$(DOCS)/node_modules/mermaid/dist/mermaid.min.js NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

tune:
	TRITON_INTERPRET=0 python3 -m benchmarks.gpu.tune

clean:
	rm -rf $(VENV) $(VLLM) $(CONFORMANCE) $(S3) $(DOCS) build dist *.egg-info
