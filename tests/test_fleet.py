"""The engines that turns are given to: how they come, go, drain, fail and return."""

import random
from dataclasses import dataclass

import pytest

from kvturn.address import EngineAddress, engine_address
from kvturn_router.engines.engine import DECODE, Engine
from kvturn_router.engines.fleet import (
    ENGINES_MAX,
    FLAGS,
    OPERATOR,
    AnnouncedEngine,
    Fleet,
    FleetFull,
)
from kvturn_router.engines.health import Health
from kvturn_router.engines.loads import Loads
from kvturn_router.engines.waiting import NoPlace, NoRoom, WaitingRoom

S = 1_000_000_000
D1 = AnnouncedEngine("d1", "decode", "http://10.0.0.1:8200", False)


# ---- by load -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stub:
    """An engine as `Loads` knows it."""

    name: str
    in_flight: int = 0
    open: bool = True


@pytest.mark.parametrize("count", [4, 200])
def test_the_least_loaded_is_found_whatever_happens_to_engines(count):
    """Few or many engines, turns that begin and end, engines that close, open, come and go."""
    dice = random.Random(7)
    loads: Loads[Stub] = Loads()
    engines = [Stub(str(number)) for number in range(count)]
    there = set(engines[: count // 2])
    for one in engines[: count // 2]:
        loads.add(one)
    for _ in range(5_000):
        one = dice.choice(engines)
        what = dice.random()
        if what < 0.4:
            one.in_flight += 1
        elif what < 0.8:
            one.in_flight = max(one.in_flight - 1, 0)
        elif what < 0.95:
            one.open = not one.open
        elif one in there:
            there.discard(one)
            loads.remove(one)
        else:
            there.add(one)
            loads.add(one)
        loads.changed(one)
        tried = dice.sample(engines, dice.choice((0, 0, 3)))
        usable = [x for x in there if x.open and x not in tried]
        best = loads.least(tried)
        assert (best is None) == (not usable)
        if best is not None:
            assert best in usable
            assert best.in_flight == min(x.in_flight for x in usable)


def test_idle_engines_take_turns():
    """Of equals the one that has not been given a turn for longest."""
    loads: Loads[Stub] = Loads()
    for name in "abc":
        loads.add(Stub(name))
    given = []
    for _ in range(6):
        one = loads.least()
        assert one is not None
        given.append(one.name)
        one.in_flight += 1
        loads.changed(one)
        one.in_flight -= 1
        loads.changed(one)
    assert given == list("abcabc")


def test_engines_that_are_only_counted_stand_in_the_same_order():
    """Lines that are drawn up when somebody asks are those of one who did at each change."""
    dice = random.Random(11)
    told: Loads[Stub] = Loads()
    counted: Loads[Stub] = Loads()
    engines = [Stub(str(number)) for number in range(6)]
    for one in engines:
        told.add(one)
        counted.add(one)
    for _ in range(20_000):
        one = dice.choice(engines)
        if dice.random() < 0.1:
            one.open = not one.open
            told.changed(one)
            counted.changed(one)
        else:
            one.in_flight += dice.choice((1, -1)) if one.in_flight else 1
            told.changed(one)
            counted.counted(one)
        if dice.random() < 0.3:
            tried = dice.sample(engines, dice.choice((0, 0, 2)))
            assert counted.least(tried) is told.least(tried)


def test_whoever_waits_hears_when_an_engine_opens_or_closes():
    """Not when one that is open all along is given less to do."""
    loads: Loads[Stub] = Loads()
    heard = []
    loads.turned = lambda: heard.append(loads.least())
    one = Stub("a", in_flight=2, open=False)
    loads.add(one)
    assert heard == []
    one.in_flight, one.open = 1, True
    loads.changed(one)
    one.in_flight = 0
    loads.changed(one)
    assert heard == [one]
    one.open = False
    loads.changed(one)
    one.open = True
    loads.changed(one)
    loads.remove(one)
    assert heard == [one, None, one, None]


# ---- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://10.0.0.7:8200", "10.0.0.7", 8200),
        ("http://d-1.example:8200/", "d-1.example", 8200),
        ("https://Engine.Example", "engine.example", 443),
        ("http://[::1]:8000", "::1", 8000),
        ("http://[2001:DB8:0::1]", "2001:db8::1", 80),
    ],
)
def test_a_base_url_is_read(url, host, port):
    """Host names in lower case, IPv6 in its short form, the scheme's own port."""
    address = engine_address(url)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.7:8200",
        "ftp://d:1",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://d:0",
        "http://d:65536",
        "http://d:x",
        "http://d:1/v1",
        "http://d:1?x=1",
        "http://d:1#x",
        "http://user@d:1",
        "http://:secret@d:1",
        "http://d d:1",
        "http://d\r\nx:1",
        "http://d%2f:1",
        "http://[::1:1",
        "http://[fe80::1%25eth0]:1",
        "http://[v1.x]:1",
    ],
)
def test_what_is_no_base_url_is_refused(url):
    """Nothing but http(s), a host and a port: nobody can smuggle in a path, a user or a header."""
    with pytest.raises(ValueError, match="must"):
        engine_address(url)


# ---- who names an engine -------------------------------------------------------------------------


class Rig:
    """A fleet with a clock of its own."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.changes = 0
        self.fleet = Fleet(self._build, lambda: self.now_ns)
        self.fleet.changed = self._count

    def _count(self) -> None:
        self.changes += 1

    def _build(self, address: EngineAddress, number: int) -> Engine:
        health = Health(interval_ns=S, failures_max=2, faults_max=3, phase=0.5, now_ns=self.now_ns)
        return Engine(address, health=health, connect_timeout_s=1, in_flight_max=2)

    def add(self, url: str, role: str = "decode") -> Engine:
        """An engine of flags that has answered."""
        engine = self.fleet.add(url, role, FLAGS)
        self.fleet.seen_well(engine)
        return engine

    def urls(self, loads: Loads[Engine]) -> list[str]:
        return [engine.url for engine in loads]

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)
        self.fleet.sweep()


def test_an_engine_that_announces_itself_serves_until_it_is_gone():
    """No flag names it. Its session ends: it is given turns for a while, and then none."""
    rig = Rig()
    rig.fleet.all_announced([D1])
    (engine,) = rig.fleet.decodes
    assert rig.fleet.missing() == ["prefill", "decode"]  # it has not answered yet
    rig.fleet.seen_well(engine)
    assert rig.fleet.missing() == ["prefill"]
    assert rig.fleet.holder("", "d1") is engine
    engine.begin()
    rig.fleet.gone(["d1"])
    rig.pass_s(9)
    assert rig.fleet.decodes.least() is engine
    rig.pass_s(2)
    assert rig.fleet.decodes.least() is None
    assert rig.fleet.holder("http://10.0.0.1:8200", "d1") is None
    assert rig.fleet._leaving == [engine]  # a turn of it runs on
    engine.end()
    rig.pass_s(0.1)
    assert rig.fleet._leaving == []


def test_a_session_that_is_back_in_time_changes_nothing():
    """Also over a change of the lease service, which at first knows no engine."""
    rig = Rig()
    rig.fleet.all_announced([D1])
    (engine,) = rig.fleet.decodes
    rig.fleet.seen_well(engine)
    rig.fleet.all_announced([])
    rig.pass_s(5)
    assert rig.fleet.decodes.least() is engine
    rig.fleet.announced([D1])
    rig.pass_s(60)
    assert rig.fleet.decodes.least() is engine


def test_flags_and_a_session_at_one_address_are_one_engine():
    """localhost is 127.0.0.1; the flags' role holds; the end of the session takes nothing away."""
    rig = Rig()
    engine = rig.add("http://localhost:8200")
    rig.fleet.announced([AnnouncedEngine("e", "both", "http://127.0.0.1:8200/", False)])
    assert list(rig.fleet) == [engine]
    assert (rig.urls(rig.fleet.prefills), engine.role) == ([], "decode")
    assert rig.fleet.holder("", "e") is rig.fleet.holder("http://127.0.0.1:8200") is engine
    assert rig.fleet.views()[0].named_by == ["flags", "session:e"]
    rig.fleet.gone(["e"])
    rig.pass_s(60)
    assert rig.fleet.decodes.least() is engine


def test_one_url_under_both_flags_serves_both_roles_with_one_load():
    """A prefill leg on it counts against it for decode too."""
    rig = Rig()
    engine = rig.add("http://a:1", "prefill")
    assert rig.add("http://a:1", "decode") is engine
    other = rig.add("http://b:1")
    engine.begin()
    assert rig.fleet.prefills.least() is engine
    assert rig.fleet.decodes.least() is other


def test_an_engine_that_moves_is_found_at_its_new_address():
    """The same id announces another address: the old one is given no turns."""
    rig = Rig()
    rig.fleet.announced([D1])
    rig.fleet.announced([D1._replace(http_address="http://10.0.0.2:8200")])
    assert rig.urls(rig.fleet.decodes) == ["http://10.0.0.2:8200"]


@pytest.mark.parametrize("address", ["", "http://10.0.0.9:1/v1", "gopher://x:1", "http://u@x:1"])
def test_an_announced_address_that_is_no_base_url_is_not_used(address, caplog):
    """Nor is the address before it; the log says so, once for an engine."""
    rig = Rig()
    rig.fleet.announced([D1])
    for _ in range(3):
        rig.fleet.announced([D1._replace(http_address=address)])
    assert list(rig.fleet) == []
    assert len([x for x in caplog.records if "is not used" in x.message]) == bool(address)


def test_there_are_at_most_so_many_engines():
    """Operators are told; sessions beyond the limit are not used."""
    rig = Rig()
    for number in range(ENGINES_MAX):
        rig.fleet.add(f"http://e{number}:1", "decode", FLAGS)
    with pytest.raises(FleetFull):
        rig.fleet.add("http://more:1", "decode", OPERATOR)
    rig.fleet.announced([D1])
    assert len(rig.fleet.decodes) == ENGINES_MAX


def test_an_operator_adds_and_removes_engines():
    """What flags say too stays when an operator withdraws."""
    rig = Rig()
    rig.add("http://a:1")
    rig.fleet.add("http://a:1", "decode", OPERATOR)
    added = rig.fleet.add("http://b:1", "prefill", OPERATOR)
    rig.fleet.seen_well(added)
    assert rig.fleet.missing() == []
    assert rig.fleet.remove("http://a:1", OPERATOR)
    assert rig.fleet.remove("http://b:1", OPERATOR)
    assert not rig.fleet.remove("http://b:1", OPERATOR)
    assert not rig.fleet.remove("http://a:1", OPERATOR)
    assert (rig.urls(rig.fleet.decodes), rig.urls(rig.fleet.prefills)) == (["http://a:1"], [])


# ---- draining ------------------------------------------------------------------------------------


def test_a_draining_engine_gets_no_new_turns_and_is_still_the_holder():
    """Drained by an operator here, or for all routers through its session."""
    rig = Rig()
    a, b = rig.add("http://a:1"), rig.add("http://b:1")
    rig.fleet.announced([AnnouncedEngine("a", "decode", "http://a:1", True)])
    assert rig.fleet.decodes.least() is b
    assert rig.fleet.holder("", "a") is a
    assert a.usable
    rig.fleet.drain("http://b:1", True)
    assert rig.fleet.decodes.least() is None
    assert "decode" in rig.fleet.missing()
    rig.fleet.announced([AnnouncedEngine("a", "decode", "http://a:1", False)])
    assert rig.fleet.decodes.least() is a
    assert rig.fleet.drain("http://b:1", False)
    assert not rig.fleet.drain("http://c:1", True)
    assert {rig.fleet.decodes.least(), rig.fleet.decodes.least([a])} == {a, b}


# ---- health --------------------------------------------------------------------------------------


def test_an_engine_is_out_until_it_answers_and_after_failures_in_a_row():
    """One bad answer is none; two are; the next good one brings it back."""
    rig = Rig()
    engine = rig.fleet.add("http://a:1", "decode", FLAGS)
    assert rig.fleet.decodes.least() is None
    rig.fleet.seen_well(engine)
    rig.fleet.seen_badly(engine, "503")
    rig.fleet.seen_well(engine)
    rig.fleet.seen_badly(engine, "503")
    assert rig.fleet.decodes.least() is engine
    before = rig.changes
    rig.fleet.seen_badly(engine, "503")
    assert rig.fleet.decodes.least() is None
    assert rig.changes == before + 1
    rig.fleet.seen_well(engine)
    assert rig.fleet.decodes.least() is engine


def test_an_engine_that_refuses_connections_is_out_at_once():
    """And asked again after an interval, then ever less often, down to a bound."""
    rig = Rig()
    engine = rig.add("http://a:1")
    rig.fleet.refused(engine, "connection refused")
    assert not engine.usable
    waits = [engine.health.due_ns / S]
    for _ in range(8):
        rig.now_ns = engine.health.due_ns
        rig.fleet.seen_badly(engine, "connection refused")
        waits.append((engine.health.due_ns - rig.now_ns) / S)
    assert waits == [1, 2, 4, 8, 10, 10, 10, 10, 10]
    rig.fleet.announced([AnnouncedEngine("a", "decode", "http://a:1", False)])
    assert engine.health.due_ns == rig.now_ns  # it is back: asked at once


def test_an_engine_that_fails_turn_after_turn_is_out_for_longer_each_time():
    """Its health answers are good all the while; a turn that it serves well clears its name."""
    rig = Rig()
    bad, good = rig.add("http://a:1"), rig.add("http://b:1")
    outs = []
    for _ in range(3):
        for _ in range(3):
            if bad.usable:
                rig.fleet.seen_well(bad)
                rig.fleet.failed(bad, "500")
        outs.append((bad.health.due_ns - rig.now_ns) / S)
        rig.now_ns = bad.health.due_ns
        rig.fleet.seen_well(bad)
    assert outs == [1, 2, 4]
    bad.health.served_well()
    rig.fleet.failed(bad, "500")
    rig.fleet.failed(bad, "500")
    assert bad.usable
    bad.health.served_well()
    rig.fleet.failed(bad, "500")
    assert bad.usable
    assert good.usable


def test_the_last_engine_of_a_role_is_not_taken_out_by_failing_turns():
    """It may be the turns' own fault; its health decides."""
    rig = Rig()
    only = rig.add("http://a:1")
    for _ in range(50):
        rig.fleet.failed(only, "500")
    assert only.usable


def test_many_engines_are_not_asked_all_at_once():
    """After the first round two hundred questions lie evenly in the interval."""
    phases = [number * 0.618034 % 1 for number in range(200)]
    healths = [
        Health(interval_ns=S, failures_max=2, faults_max=5, phase=phase, now_ns=0)
        for phase in phases
    ]
    for one in healths:
        one.answered_well(0)
    tenths = [int(one.due_ns * 10 / S) for one in healths]
    assert all(18 <= tenths.count(tenth) <= 22 for tenth in range(10))
    for one in healths:
        first_ns = one.due_ns
        one.answered_well(first_ns)
        assert one.due_ns == first_ns + S


# ---- waiting for room ----------------------------------------------------------------------------


def no_room() -> int:
    raise NoRoom(DECODE)


def test_turns_wait_in_line_for_an_engine_with_room():
    """Two at once on the only engine; the third waits, the fourth cannot overtake it."""
    rig = Rig()
    engine = rig.add("http://a:1")
    room = WaitingRoom(roles=[DECODE], places=2, patience_ns=5 * S)
    rig.fleet.decodes.turned = room.serve

    def take() -> Engine:
        one = rig.fleet.decodes.least()
        if one is None:
            raise NoRoom(DECODE)
        one.begin()
        return one

    turns = [room.claim(take, rig.now_ns) for _ in range(4)]
    assert [turn.claim for turn in turns] == [engine, engine, None, None]
    with pytest.raises(NoPlace, match="All engines are busy"):
        room.claim(take, rig.now_ns)
    served = []
    for number, turn in enumerate(turns):
        turn.done = lambda number=number: served.append(number)
    engine.end()
    assert served == [2]
    assert engine.in_flight == 2
    room.leave(turns[3])
    engine.end()
    assert served == [2]
    assert engine.in_flight == 1


def test_a_wait_has_an_end():
    """Nobody made room: those in line are told after the patience, in their order."""
    room = WaitingRoom(roles=[DECODE], places=5, patience_ns=2 * S)
    first = room.claim(no_room, 0)
    second = room.claim(no_room, S)
    assert room.next_deadline_ns() == 2 * S
    room.expire(2 * S)
    assert isinstance(first.refusal, NoPlace)
    assert second.refusal is None
    room.expire(3 * S)
    assert len(room) == 0
    assert room.next_deadline_ns() is None


def test_a_claim_that_fails_ends_that_wait_alone():
    """The engines it could have had are gone by then; the next in line is served."""
    room = WaitingRoom(roles=[DECODE], places=5, patience_ns=S)
    there = False

    def fails() -> int:
        if there:
            raise LookupError
        raise NoRoom(DECODE)

    first = room.claim(fails, 0)
    second = room.claim(lambda: 7 if there else no_room(), 0)
    there = True
    room.serve()
    assert isinstance(first.refusal, LookupError)
    assert second.claim == 7


def test_no_place_to_wait_means_no_waiting():
    """A line of length 0: who cannot be served at once comes again later."""
    room = WaitingRoom(roles=[DECODE], places=0, patience_ns=S)
    assert room.claim(lambda: 1, 0).claim == 1
    with pytest.raises(NoPlace):
        room.claim(no_room, 0)
