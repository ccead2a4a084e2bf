"""The OpenAPI document is valid, names the routes that there are, and says what they answer."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from router_harness import FakeLease, Rig, router, turn_body
from ui_scene import populated, some_turns

from kvturn.v1 import common_pb2
from kvturn_router.request.conversation import TurnReport
from kvturn_router.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "docs" / "api"
DOCUMENT: dict[str, Any] = yaml.safe_load((API / "openapi.yaml").read_text())
NOT_ALWAYS = {"x-kvturn-saved-ms"}
"""Headers of answers that tell what is not always known."""
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATOR = "operator-0123456789"


def found(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of the document, followed if it is a reference."""
    while "$ref" in part:
        reference = part["$ref"]
        part = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            part = part[key]
    return part


def told(path: str, method: str, status: int) -> dict[str, Any]:
    """Returns what the document says of an answer."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    return found(responses.get(str(status)) or responses["default"])


class Asker:
    """Asks a router and holds each answer against the document."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def ask(
        self,
        method: str,
        path: str,
        target: str = "",
        body: Any = None,
        key: str | None = None,
        status: int = 200,
    ) -> Any:
        headers = [] if key is None else [("authorization", f"Bearer {key}")]
        if body is not None:
            headers.append(("content-type", "application/json"))
        data = None if body is None else json.dumps(body).encode()
        answer = await self._rig.ask(method, target or path, data, headers)
        assert answer.status == status, answer.body
        said = told(path, method.lower(), status)
        schema = said["content"]["application/json"]["schema"]
        whole = (
            schema if isinstance(schema, bool) else {**schema, "components": {"schemas": SCHEMAS}}
        )
        Draft202012Validator(whole).validate(answer.json)
        for name in said.get("headers", {}).keys() - NOT_ALWAYS:
            assert name in answer.headers, name
        return answer.json


def test_the_document_is_valid_openapi() -> None:
    """By the validator that the OpenAPI project's tools use."""
    validate(DOCUMENT)


def test_the_page_is_what_the_document_gives() -> None:
    """http.md is generated; this fails when it was edited, or not made anew."""
    spec = importlib.util.spec_from_file_location("http_docs", ROOT / "scripts/gen_http_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (API / "http.md").read_text(), "run make proto"


def test_words_are_those_of_the_code() -> None:
    """Verdicts, plans and the members of a turn."""
    assert SCHEMAS["Verdict"]["enum"] == [verdict.value for verdict in Verdict]
    plans = [name.removeprefix("PLAN_KIND_").lower() for name in common_pb2.PlanKind.keys()[1:]]
    assert SCHEMAS["Plan"]["enum"] == plans
    members = {"conversation_id", *TurnReport.__struct_fields__}
    assert set(SCHEMAS["Turn"]["properties"]) == members


async def test_each_route_answers_as_the_document_says() -> None:
    """Every route that the router names when asked for another is in the document, and no other."""
    async with router() as rig:
        refusal = await rig.ask("GET", "/elsewhere")
        assert refusal.status == 404
        named = refusal.json["error"]["message"].partition(", but ")[2].rstrip(".").split(", ")
    paths = {re.sub(r"\{\w+\}", "{}", path) for path in DOCUMENT["paths"]}
    routes = {re.sub(r"\{\w+\}", "{}", route.partition("?")[0]) for route in named}
    assert routes | {"/v1/responses/{}", "/v1/responses/{}/cancel"} == paths


async def test_conversations_are_told_as_documented() -> None:
    """A turn, what is known of its conversation, keeping it and ending it; with their faults."""
    async with router(lease=FakeLease()) as rig:
        asker = Asker(rig)
        chat = "/v1/chat/completions"
        await asker.ask("POST", chat, body=turn_body(conversation_id="c1"))
        await asker.ask("POST", chat, body={"model": "m", "messages": 1}, status=400)
        await asker.ask("GET", "/v1/models")
        one = "/kvturn/v1/conversations/{conversation_id}"
        await asker.ask("GET", one, "/kvturn/v1/conversations/c1?model=m")
        await asker.ask("GET", one, "/kvturn/v1/conversations/c1", status=400)
        alive = f"{one}/keepalive"
        target = "/kvturn/v1/conversations/c1/keepalive?model=m"
        await asker.ask("POST", alive, target, {"absence_s": 5})
        await asker.ask("POST", alive, target, {"absence_s": -1}, status=400)
        await asker.ask("DELETE", one, "/kvturn/v1/conversations/c1?model=m")
    async with router() as rig:
        asker = Asker(rig)
        told = await asker.ask("POST", chat, body=turn_body(conversation_id="c1"))
        model = turn_body()["model"]
        view = await asker.ask("GET", one, f"/kvturn/v1/conversations/c1?model={model}")
        assert told["object"] == "chat.completion"
        assert len(view["turns"]) == 1
        await asker.ask("GET", one, "/kvturn/v1/conversations/c2?model=m", status=404)
        await asker.ask("POST", alive, target, {"absence_s": 5}, status=501)


async def test_what_the_page_asks_for_is_told_as_documented(tmp_path: Path) -> None:
    """The summary and the list, with a lease service that answers, is silent, or is not there."""
    (tmp_path / "keys").write_text("client-0123456789 team-a\n")
    summary, listed = "/kvturn/v1/summary", "/kvturn/v1/conversations"
    async with router(lease=populated()) as rig:
        await some_turns(rig)
        asker = Asker(rig)
        assert (await asker.ask("GET", summary))["recent"]["turns"] == 6
        assert (await asker.ask("GET", listed))["total"] == 7
        await asker.ask("GET", listed, f"{listed}?limit=0", status=400)
    async with router(lease=populated()) as rig:
        await some_turns(rig)
        rig.lease.silent = True
        asker = Asker(rig)
        assert (await asker.ask("GET", summary))["lease_service"]["problem"]
        assert (await asker.ask("GET", listed))["problem"]
    async with router(f"--api-keys-file={tmp_path}/keys") as rig:
        asker = Asker(rig)
        await asker.ask("GET", listed, key="client-0123456789")
        await asker.ask("GET", listed, f"{listed}?tenant=b", key="client-0123456789", status=403)
        await asker.ask("GET", listed, status=401)
        await asker.ask("GET", summary, key="client-0123456789", status=403)


async def test_operators_are_answered_as_documented(tmp_path: Path) -> None:
    """Engines are listed, added, drained and removed; health and readiness."""
    keys = tmp_path / "keys"
    keys.write_text(OPERATOR)
    async with router(f"--admin-keys-file={keys}") as rig:
        asker = Asker(rig)
        engines, drain = "/kvturn/v1/engines", "/kvturn/v1/engines/drain"
        new = {"url": "http://127.0.0.1:1", "role": "decode"}
        await asker.ask("GET", engines)
        await asker.ask("GET", "/kvturn/v1/settings")
        await asker.ask("POST", engines, body=new, key=OPERATOR)
        await asker.ask("POST", engines, body=new, status=401)
        await asker.ask("POST", engines, body={"url": "x"}, key=OPERATOR, status=400)
        await asker.ask(
            "POST", drain, f"{drain}?url=http://127.0.0.1:1&draining=true", key=OPERATOR
        )
        flagged = f"{engines}?url={rig.decode.url}"
        await asker.ask("DELETE", engines, flagged, key=OPERATOR, status=409)
        await asker.ask("DELETE", engines, f"{engines}?url=http://127.0.0.1:1", key=OPERATOR)
        await asker.ask("GET", "/health")
        await asker.ask("GET", "/ready")
        await asker.ask("POST", drain, f"{drain}?url={rig.decode.url}&draining=true", key=OPERATOR)
        await asker.ask("GET", "/ready", status=503)
    async with router() as rig:
        await Asker(rig).ask("POST", engines, body=new, status=403)
