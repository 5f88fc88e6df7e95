# syntax=docker/dockerfile:1
# Two targets: `make docker-cpu` runs the miniature, `make docker-gpu` the paper's setting (CUDA 13, NVIDIA container runtime).
# The base is pinned by digest; `make` looks the digest up, or give one: make docker-cpu BASE_DIGEST=sha256:...
ARG BASE_DIGEST
FROM python:3.11-slim-bookworm@${BASE_DIGEST} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

FROM base AS cpu-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/cpu.txt /tmp/requirements/cpu.txt
RUN python -m venv /opt/venv \
    && torch="$(grep '^torch==' /tmp/requirements/cpu.txt)" \
    && { /opt/venv/bin/pip install --quiet --no-deps "$torch" \
         || /opt/venv/bin/pip install --quiet --no-deps --extra-index-url "$TORCH_INDEX" "$torch"; } \
    && /opt/venv/bin/pip install --quiet --no-deps -r /tmp/requirements/cpu.txt

FROM base AS gpu-packages
COPY requirements/gpu.txt /tmp/requirements/gpu.txt
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --quiet --no-deps -r /tmp/requirements/gpu.txt

# What both run on: a compiler (Triton and PyTorch compile kernels when they start), OpenMP, git for the commit's name.
FROM base AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libgomp1 libnuma1 git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trm \
    && install --directory --owner trm --group trm /work /work/runs /cache
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
WORKDIR /work

FROM runtime AS cpu
COPY --from=cpu-packages /opt/venv /opt/venv
COPY --chown=trm:trm . /work
RUN pip install --quiet --no-deps --no-build-isolation --editable .
USER 1000
HEALTHCHECK --interval=60s --timeout=20s --start-period=10s CMD ["trm-repro", "bounds", "--json"]
ENTRYPOINT ["trm-repro"]
CMD ["reproduce"]

FROM runtime AS gpu
COPY --from=gpu-packages /opt/venv /opt/venv
COPY --chown=trm:trm . /work
RUN pip install --quiet --no-deps --no-build-isolation --editable .
USER 1000
HEALTHCHECK --interval=60s --timeout=20s --start-period=10s CMD ["trm-repro", "bounds", "--json"]
ENTRYPOINT ["trm-repro"]
CMD ["reproduce", "conf/paper.yaml"]

# The tracking server, with PostgreSQL's driver and without the engine.
FROM base AS mlflow
COPY requirements/mlflow.txt /tmp/requirements/mlflow.txt
RUN pip install --quiet --no-deps -r /tmp/requirements/mlflow.txt \
    && useradd --create-home --uid 1000 mlflow \
    && install --directory --owner mlflow --group mlflow /artifacts
USER 1000
EXPOSE 5000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=4)"]
# The password comes from a mounted secret, never from the image or the command line; MLflow answers no other Host names.
CMD ["bash", "-c", "export MLFLOW_BACKEND_STORE_URI=\"postgresql+psycopg2://mlflow:$(</run/secrets/postgres_password)@postgres/mlflow\" && exec mlflow server --host 0.0.0.0 --port 5000 --artifacts-destination /artifacts --allowed-hosts 'mlflow:*,localhost:*,127.0.0.1:*'"]
