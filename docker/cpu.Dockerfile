# docker build --file docker/cpu.Dockerfile --tag psigrad:cpu .
# docker run --rm --volume "$PWD:/work" psigrad:cpu grpo --model … --dataset prompts.jsonl --reward exact
FROM python:3.12-slim-bookworm AS builder

# compile the CPU kernels, and pycosat, which the tasks of reasoning-gym need
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /psigrad
RUN PSIGRAD_PREBUILD=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --constraint /psigrad/constraints.txt /psigrad pycosat

FROM python:3.12-slim-bookworm

# psigrad runs programs written by a model inside bubblewrap
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
COPY --from=builder /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --find-links /tmp/wheels "$(echo /tmp/wheels/psigrad-*.whl)[studio,control,tasks]"

RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["psigrad"]
CMD ["--help"]
