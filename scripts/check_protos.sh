#!/bin/sh
# Fails when the committed generated code and documents are not what the protos give.
set -eu
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
sh scripts/gen_protos.sh .envs/protoc/bin/python "$fresh" "$fresh/docs/api"
for folder in kvturn/v1 kvturn/etcd/v3; do
    for file in "$fresh/$folder"/* "protos/$folder"/*_pb2*; do
        name=$folder/$(basename "$file")
        if ! cmp -s "$fresh/$name" "protos/$name"; then
            echo "check-protos: protos/$name is not current; run make proto and commit" >&2
            exit 1
        fi
    done
done
for file in "$fresh"/docs/api/* docs/api/grpc-*.md; do
    name=docs/api/$(basename "$file")
    if ! cmp -s "$fresh/$name" "$name"; then
        echo "check-protos: $name is not current; run make proto and commit" >&2
        exit 1
    fi
done
