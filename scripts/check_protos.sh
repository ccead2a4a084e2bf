#!/bin/sh
# Fails when the committed generated code is not what the protos give.
set -eu
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
sh scripts/gen_protos.sh .envs/protoc/bin/python "$fresh"
for file in "$fresh"/kvturn/v1/* protos/kvturn/v1/*_pb2*; do
    name=kvturn/v1/$(basename "$file")
    if ! cmp -s "$fresh/$name" "protos/$name"; then
        echo "check-protos: protos/$name is not current; run make proto and commit" >&2
        exit 1
    fi
done
