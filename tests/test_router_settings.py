"""What a router tells of how it was started, and to whom."""

import json
import time
from pathlib import Path

from router_harness import FakeLease, router

from kvturn_router.front.settings_front import SETTINGS

SECRET = "kvt-0123456789abcdef"


async def test_a_router_tells_how_it_was_started() -> None:
    """What reuse depends on, by the flags' names; null where the costs decide."""
    lease = FakeLease()
    async with router("--plan=pull", "--holder-margin=3", lease=lease) as rig:
        answer = await rig.ask("GET", SETTINGS)
        await lease.until(lambda: bool(lease.hellos))
    told = answer.json
    assert answer.status == 200
    assert told["lease"] == [lease.address]
    assert (told["plan"], told["holder_margin"], told["pull_min_tokens"]) == ("pull", 3, None)
    assert (told["stock_reuse"], told["workers"], told["api_keys"]) == (False, 1, False)
    assert abs(told["wall_time_s"] - time.time()) < 60
    assert told["version"]
    assert told["router_id"] == lease.hellos[0].router_id


async def test_where_clients_need_keys_only_an_operator_is_told(tmp_path: Path) -> None:
    """And nobody is told a key or where keys lie."""
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text(SECRET)
    operators.write_text(f"{SECRET}-operator")
    flags = (f"--api-keys-file={clients}", f"--admin-keys-file={operators}")
    async with router(*flags) as rig:
        refused = [
            (await rig.ask("GET", SETTINGS, headers=headers)).status
            for headers in ((), (("authorization", f"Bearer {SECRET}"),))
        ]
        operator = (("authorization", f"Bearer {SECRET}-operator"),)
        answer = await rig.ask("GET", SETTINGS, headers=operator)
        posted = await rig.ask("POST", SETTINGS, b"{}", operator)
    assert refused == [401, 401]
    assert (answer.status, posted.status) == (200, 405)
    assert SECRET not in json.dumps(answer.json)
    assert str(tmp_path) not in json.dumps(answer.json)
