# docker build --file docker/cuda.Dockerfile --tag psigrad:cuda .
# docker run --rm --gpus all --volume "$PWD:/work" psigrad:cuda grpo --model … --dataset prompts.jsonl --reward exact
# The driver on the machine must be one for CUDA 13; torch brings the rest of CUDA along.
FROM python:3.12-slim-bookworm AS builder

# what has to be compiled: the kernels for a CPU, and pycosat for the tasks of reasoning-gym
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /psigrad
RUN PSIGRAD_PREBUILD=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --constraint /psigrad/constraints.txt /psigrad pycosat

FROM python:3.12-slim-bookworm

# bubblewrap runs programs that a model wrote
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130
COPY constraints.txt /tmp/constraints.txt
COPY --from=builder /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --find-links /tmp/wheels "$(echo /tmp/wheels/psigrad-*.whl)[studio,control,tasks]"

RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["psigrad"]
CMD ["--help"]
