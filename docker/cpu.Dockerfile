# docker build --file docker/cpu.Dockerfile --tag psigrad:cpu .
# docker run --rm --volume "$PWD:/work" psigrad:cpu grpo --model … --dataset prompts.jsonl --reward exact
FROM python:3.12-slim-bookworm

# g++ compiles the kernels for this processor on first use; bubblewrap runs programs that a model wrote
RUN apt-get update && apt-get install --yes --no-install-recommends g++ bubblewrap && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
COPY . /tmp/psigrad
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "/tmp/psigrad[studio,control,tasks]" && rm -rf /tmp/psigrad

RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["psigrad"]
CMD ["--help"]
