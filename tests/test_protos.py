"""Generated code runs on every protobuf that vLLM accepts; the connector installs alone."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVS = ROOT / ".envs"


def run_python(environment: str, code: str, **variables: str) -> str:
    """Runs code with an environment's Python, away from the checkout; returns what it printed."""
    python = ENVS / environment / "bin" / "python"
    assert python.exists(), f"{python} is missing; run make setup-fast"
    done = subprocess.run(
        [str(python), "-c", code],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["5.29.6", "6.33.5", "7.36.2"])
def test_generated_code_runs_on_protobuf(version: str) -> None:
    """Import, build, serialise and parse under one protobuf version."""
    code = """
import warnings; warnings.simplefilter("error")
import google.protobuf, grpc
from kvturn.etcd.v3 import etcd_pb2
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc, router_pb2, router_pb2_grpc
key = common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c")
sent = lease_pb2.BeginReadRequest(lease_id="i.1.1", conversation=key)
assert lease_pb2.BeginReadRequest.FromString(sent.SerializeToString()) == sent
put = etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=b"k", lease=7))
assert etcd_pb2.RequestOp.FromString(put.SerializeToString()) == put
assert tuple(map(int, grpc.__version__.split(".")[:3])) >= (1, 71, 2)
lease_pb2_grpc.LeaseServiceStub(grpc.insecure_channel("127.0.0.1:1"))
router_pb2_grpc.RouterServiceStub(grpc.insecure_channel("127.0.0.1:1"))
print(google.protobuf.__version__)
"""
    printed = run_python(f"protobuf-{version}", code, PYTHONPATH=str(ROOT / "protos"))
    assert printed.strip() == version


def test_the_connector_installs_alone() -> None:
    """Its wheel brings only grpcio, protobuf and opentelemetry, and its cores need no vLLM."""
    code = """
import importlib.metadata, json, sys
import kvturn_connector.digest, kvturn_connector.retention
from kvturn.v1 import lease_pb2_grpc
assert "grpc" not in kvturn_connector.digest.__dict__
assert not {"vllm", "torch"} & set(sys.modules)
names = [d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()]
print(json.dumps(names))
"""
    names = set(json.loads(run_python("connector-alone", code)))
    assert {"kvturn-connector", "kvturn-protos", "grpcio", "protobuf"} <= names
    others = {name for name in names if not name.startswith(("kvturn-", "opentelemetry-"))}
    assert others == {"grpcio", "protobuf", "googleapis-common-protos", "typing-extensions"}
