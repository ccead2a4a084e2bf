"""Asks the router: ready, settings, engines, models."""

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvturn_cli.doctor.facts import Clock, RouterEngine, RouterFacts, RouterSettings
from kvturn_cli.doctor.probes.http import Answer, Question, Unanswered, ask

T = TypeVar("T")

SETTINGS = "/kvturn/v1/settings"
ENGINES = "/kvturn/v1/engines"


@dataclass(frozen=True)
class RouterAccess:
    """Where the router is and who we are to it."""

    url: str
    """Base URL, without /v1."""
    api_key: str = ""
    """A client's key."""
    admin_key: str = ""
    """An operator's key."""
    tls: ssl.SSLContext | None = None

    def question(self, path: str, key: str, **more: Any) -> Question:
        """Returns a question to the router."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return Question(
            self.url + path, {**headers, **more.pop("headers", {})}, tls=self.tls, **more
        )


async def probe_router(access: RouterAccess, timeout_s: float) -> RouterFacts:
    """Asks all that there is to ask at once."""
    keys = {SETTINGS: access.admin_key, ENGINES: access.admin_key, "/v1/models": access.api_key}
    paths = ("/ready", SETTINGS, ENGINES, "/v1/models")
    ready, settings, engines, models = await asyncio.gather(
        *(_ask(access.question(path, keys.get(path, ""), timeout_s=timeout_s)) for path in paths)
    )
    if isinstance(ready, str):
        return RouterFacts(access.url, ready)
    told = _json(ready)
    known, problem = _models(models)
    return RouterFacts(
        access.url,
        ready=ready.status == 200,
        not_ready=str(told.get("reason") or f"HTTP {ready.status}"),
        settings=_settings(settings),
        engines=_engines(engines),
        hidden=_hidden(settings),
        models=known,
        models_problem=problem,
        clock=_clock(access.url, settings, ready),
    )


async def _ask(question: Question) -> Answer | str:
    """Returns the answer, or why there is none."""
    try:
        return await ask(question)
    except Unanswered as problem:
        return str(problem)


def _json(answer: Answer | str) -> Mapping[str, Any]:
    if isinstance(answer, str):
        return {}
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _read(value: object, kind: type[T]) -> T | None:
    """Returns what an answer says as `kind`; None where it is no such thing."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _hidden(answer: Answer | str) -> str:
    if isinstance(answer, str):
        return answer
    if answer.status in (401, 403):
        return "only an operator may see them"
    if answer.status != 200:
        return f"{SETTINGS} answers HTTP {answer.status}"
    if _settings(answer) is None:
        return f"what {SETTINGS} answers are no settings of a kvturn router"
    return ""


def _settings(answer: Answer | str) -> RouterSettings | None:
    if isinstance(answer, str) or answer.status != 200:
        return None
    told = _json(answer)
    return _read(told, RouterSettings) if "lease" in told else None


def _engines(answer: Answer | str) -> Sequence[RouterEngine] | None:
    if isinstance(answer, str) or answer.status != 200:
        return None
    return _read(_json(answer).get("engines"), list[RouterEngine])


def _models(answer: Answer | str) -> tuple[Sequence[str], str]:
    if isinstance(answer, str):
        return (), answer
    if answer.status in (401, 403):
        return (), "the router wants an API key of a client: --api-key"
    if answer.status != 200:
        return (), f"/v1/models answers HTTP {answer.status}"
    told = _read(_json(answer).get("data"), list[dict[str, object]])
    if told is None:
        return (), "what /v1/models answers is no list of models"
    return [str(model.get("id", "")) for model in told], ""


def _clock(url: str, settings: Answer | str, ready: Answer) -> Clock | None:
    told_s = _json(settings).get("wall_time_s")
    if isinstance(settings, str) or not isinstance(told_s, float):
        return ready.clock
    return Clock(f"router {url}", told_s - settings.headed_s, told_s - settings.asked_s)
