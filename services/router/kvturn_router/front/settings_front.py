"""The route by which operators see how a router was started: `/kvturn/v1/settings`.

It tells what reuse depends on and nothing secret. Whoever may see the engines may see it.
"""

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import msgspec

from kvturn_router.config import RouterConfig
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest
from kvturn_router.request.keys import ApiKeys, operator_of

SETTINGS: Final = "/kvturn/v1/settings"

_JSON: Final = ((b"content-type", b"application/json"),)


class SettingsFront:
    """Serves `SETTINGS`.

    `router_id` is what this process calls itself to the lease service. `admin_keys` are
    operators', None for none. `anyone_may_see` says that clients need no key.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        *,
        admin_keys: ApiKeys | None,
        anyone_may_see: bool,
    ) -> None:
        self._settings = {**settings_of(config), "router_id": router_id}
        self._admin_keys = admin_keys
        self._anyone_may_see = anyone_may_see

    def serve(self, answer: HttpAnswer, request: HttpRequest) -> None:
        """Answers a GET. Raises TurnError for who may not see it."""
        if not self._anyone_may_see:
            operator_of(self._admin_keys, request.headers)
        # The wall clock is for comparing what traces say.
        body = {**self._settings, "wall_time_s": time.time()}
        answer.whole(200, _JSON, msgspec.json.encode(body))


def settings_of(config: RouterConfig) -> Mapping[str, object]:
    """Returns what is told of the settings, by the flags' names; null where nothing is set."""
    thresholds = config.thresholds
    return {
        "version": version("kvturn-router"),
        "lease": list(config.lease),
        "plan": "auto" if thresholds.way is None else thresholds.way.value,
        "local_suffix_max_tokens": thresholds.local_suffix_tokens_max,
        "pull_min_tokens": thresholds.pull_tokens_min,
        "holder_margin": thresholds.holder_margin,
        "question_deadline_ms": config.question_deadline_ms,
        "read_margin_ms": config.read_margin_ms,
        "stock_reuse": config.stock_reuse,
        "stock_ttl_s": config.stock_ttl_s,
        "max_conversations": config.conversations_max,
        "workers": config.workers,
        "api_keys": config.api_keys_file is not None,
        "otlp_endpoint": None if config.traces is None else config.traces.endpoint,
        "otlp_protocol": None if config.traces is None else config.traces.protocol,
    }
