# Routers, lease services and the command line: all of kvturn but the engines.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
COPY deploy/compose/images/with-index /usr/local/bin/
COPY requirements/uv.txt requirements/build.txt requirements/workspace.txt /src/requirements/
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv /uv \
    && with-index /uv/bin/pip install --quiet --require-hashes -r /src/requirements/uv.txt \
    && /uv/bin/uv venv --quiet /opt/kvturn
ENV VIRTUAL_ENV=/opt/kvturn UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /src
COPY deploy/compose/images/dependencies.py ./
COPY protos/pyproject.toml protos/
COPY services/lease/pyproject.toml services/lease/
COPY services/router/pyproject.toml services/router/
COPY connector/pyproject.toml connector/
COPY cli/pyproject.toml cli/
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    python3 dependencies.py */pyproject.toml services/*/pyproject.toml > needed.txt \
    && with-index /uv/bin/uv pip install --quiet --constraints requirements/workspace.txt -r needed.txt
COPY protos protos
COPY services services
COPY connector connector
COPY cli cli
RUN --mount=type=secret,id=index.env --mount=type=secret,id=ca.pem \
    --mount=type=cache,target=/root/.cache \
    with-index /uv/bin/uv pip install --quiet --no-deps --no-sources --build-constraints requirements/build.txt \
    ./protos ./services/lease ./services/router ./connector ./cli

FROM ${PYTHON_IMAGE}
# A volume takes its owner from the folder that it is first mounted on, unless that says nocopy.
RUN for folder in lease router engine operator etcd-1 etcd-2 etcd-3 prometheus grafana gpu-cache; do \
        mkdir -p -m 700 "/var/lib/kvturn/$folder" || exit; \
    done && chown -R 10001:10001 /var/lib/kvturn
COPY --from=build /opt/kvturn /opt/kvturn
COPY deploy/compose/images/make-secrets deploy/compose/images/is-healthy /usr/local/bin/
COPY deploy/compose/images/check_settings.py /usr/local/bin/check-settings
ENV PATH=/opt/kvturn/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["kvturn"]
