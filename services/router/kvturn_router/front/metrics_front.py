"""The route from which Prometheus reads: `/metrics`.

As with the engines, anybody who reaches the router may read where clients need
no key; where they do, only an operator, unless the router was told otherwise.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from kvturn.metrics import Family, Page
from kvturn.metrics_page import written
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest
from kvturn_router.request.keys import ApiKeys, operator_of

METRICS: Final = "/metrics"


class MetricsFront:
    """Serves `METRICS`.

    `pages` returns what there is to tell, by worker. `admin_keys` are operators',
    None for none. `anyone_may_read` says that no key is needed.
    """

    def __init__(
        self,
        families: Sequence[Family],
        pages: Callable[[], Awaitable[Mapping[str, Page]]],
        *,
        admin_keys: ApiKeys | None,
        anyone_may_read: bool,
    ) -> None:
        self._families = families
        self._pages = pages
        self._admin_keys = admin_keys
        self._anyone_may_read = anyone_may_read

    async def serve(self, answer: HttpAnswer, request: HttpRequest) -> None:
        """Answers a GET. Raises TurnError."""
        if not self._anyone_may_read:
            operator_of(self._admin_keys, request.headers)
        accept = request.headers.get("accept", "")
        content_type, body = await written(self._families, await self._pages(), accept)
        answer.whole(200, ((b"content-type", content_type.encode()),), body)
