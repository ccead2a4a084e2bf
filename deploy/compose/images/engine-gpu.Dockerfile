# A vLLM engine on an NVIDIA GPU: vLLM's own image, and kvturn's connector beside it.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS connector
COPY deploy/compose/images/with-index /usr/local/bin/
WORKDIR /src
COPY requirements/uv.txt requirements/build.txt requirements/
COPY protos protos
COPY connector connector
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv /uv \
    && with-index /uv/bin/pip install --quiet --require-hashes -r requirements/uv.txt \
    && with-index /uv/bin/uv pip install --quiet --no-deps --no-sources \
    --build-constraints requirements/build.txt --target /opt/connector ./protos ./connector

FROM ${VLLM_IMAGE}
COPY --from=connector /opt/connector /opt/connector
COPY deploy/compose/images/engine deploy/compose/images/is-healthy /usr/local/bin/
ENV PYTHONPATH=/opt/connector PYTHONUNBUFFERED=1 HOME=/tmp
# Nobody is called 10001 in here, and torch asks for the name of who it runs as.
ENV USER=kvturn LOGNAME=kvturn
# What the connector needs is vLLM's own requirement too; an image without it is refused here.
RUN python3 -c 'import grpc, nixl, opentelemetry.sdk, kvturn_connector'
USER 10001:10001
ENTRYPOINT ["engine"]
