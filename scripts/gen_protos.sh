#!/bin/sh
# Generates protos/kvturn/**/*_pb2* with grpcio-tools 1.71.2, whose output runs on every protobuf
# that vLLM accepts (5.29.6 to 7.x), and docs/api/grpc-*.md from their comments.
# $1: python of an environment that holds it; $2, $3: output folders of code and documents.
set -eu
python=${1:?which python? as make proto gives it: .envs/protoc/bin/python}
out=${2:-protos}
docs=${3:-docs/api}
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I protos \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" --mypy_grpc_out="$out" \
    protos/kvturn/v1/*.proto
# Messages alone: etcd's methods are called by their full names.
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" \
    protos/kvturn/etcd/v3/*.proto
"$python" scripts/gen_api_docs.py "$docs"
