"""Which conversation a turn goes on with: scenarios, then any run against a plain list."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvturn.recognition import POINTS_MAX, Key, Named, Recognition, minted_id

Chat = tuple[str, ...]
"""Messages in order; those that begin with "a" are answers."""


def points_of(chat: Chat) -> list[bytes]:
    """Returns a chat's points as a router makes them, with readable digests of 16 bytes."""
    cuts = [place for place in range(len(chat) - 1, 0, -1) if chat[place].startswith("a")]
    places = dict.fromkeys([len(chat), *cuts[:18], 1])
    return [digest(chat[:place]) for place in places]


def digest(chat: Chat) -> bytes:
    return (f"{hash(chat) & (1 << 64) - 1:016x}").encode()


class World:
    """One recognition and the turns of some clients, all of one tenant and model."""

    def __init__(self, entries_max: int = 1000) -> None:
        self.recognition = Recognition(entries_max)
        self.minted = 0

    def key(self, conversation_id: str) -> Key:
        return ("tenant", "model", conversation_id)

    def ask(self, chat: Chat, named: str = "", scope: str = "") -> Named:
        """Begins a turn."""
        self.minted += 1
        key = self.key(named or minted_id(scope, f"{self.minted:012x}" + "0" * 20))
        # As a router seeds them.
        points = [digest((named or scope, str(point))) for point in points_of(chat)]
        answer = self.recognition.name(key, not named, points)
        self.recognition.began(self.key(answer.conversation_id), points)
        return answer

    def end(self, *answers: Named) -> None:
        """Ends turns."""
        for answer in answers:
            self.recognition.ended(self.key(answer.conversation_id))

    def turn(self, chat: Chat, named: str = "", scope: str = "") -> Named:
        """Serves a turn whole, and retains its KV."""
        answer = self.ask(chat, named, scope)
        self.end(answer)
        own = digest((named or scope, str(points_of(chat)[0])))
        self.recognition.retained(self.key(answer.conversation_id), own)
        return answer


FIRST = ("system", "u1")
SECOND = (*FIRST, "a1", "u2")
THIRD = (*SECOND, "a2", "u3")
ways = pytest.mark.parametrize("way", [{"named": "C"}, {"scope": "S"}, {}], ids=str)


@ways
def test_a_growing_history_is_one_conversation(way):
    """Whatever its client names, each turn goes on from the one before."""
    world = World()
    first, second, third = (world.turn(chat, **way) for chat in (FIRST, SECOND, THIRD))
    assert first.conversation_id == second.conversation_id == third.conversation_id
    assert [first.known, second.known, third.known] == [False, True, True]
    assert [first.extends, second.extends, third.extends] == [False, True, True]


def test_ids_say_who_named_them():
    """The client's own, one within its scope, one of nobody's."""
    world = World()
    assert world.turn(FIRST, named="C").conversation_id == "C"
    assert world.turn(FIRST, scope="S").conversation_id.startswith("S~")
    assert world.turn(FIRST).conversation_id.startswith("conv-")


@ways
def test_a_turn_that_comes_before_the_end_of_the_last_is_told_goes_on_from_it(way):
    """The client has the whole answer; its grant is on its way."""
    world = World()
    first = world.ask(FIRST, **way)
    second = world.ask(SECOND, **way)
    assert second == Named(first.conversation_id, known=True, extends=True, awaits=True)
    world.end(first, second)
    assert not world.turn(THIRD, **way).awaits


@ways
def test_a_fork_gets_a_conversation_of_its_own_while_the_other_is_in_flight(way):
    """Two questions after one answer at the same time; each goes on by itself."""
    world = World()
    trunk = world.turn(FIRST, **way)
    left, right = ((*FIRST, "a1", side) for side in ("left", "right"))
    one, other = world.ask(left, **way), world.ask(right, **way)
    assert one.conversation_id == trunk.conversation_id != other.conversation_id
    assert not other.known
    world.end(one, other)
    assert world.turn((*left, "a", "u"), **way).conversation_id == one.conversation_id
    assert world.turn((*right, "a", "u"), **way).conversation_id == other.conversation_id


def test_parallel_agents_of_one_session_are_told_apart():
    """Ten chats in one scope, their turns mixed: each turn goes on from its own chat's last."""
    world = World()
    chats = {agent: (f"you are {agent}", "task") for agent in range(10)}
    ids = {agent: world.turn(chat, scope="S").conversation_id for agent, chat in chats.items()}
    assert len(set(ids.values())) == 10
    for step in range(5):
        running = {}
        for agent in chats:
            chats[agent] = (*chats[agent], f"a{step}", f"tool result {step}")
            running[agent] = world.ask(chats[agent], scope="S")
        for agent, answer in running.items():
            assert answer == Named(ids[agent], known=True, extends=True)
            world.end(answer)
    assert set(world.recognition.branches("tenant", "model", "S")) == set(ids.values())


@ways
def test_an_answer_tried_again_goes_on_with_its_conversation(way):
    """The same history once more: what it holds beyond is replaced."""
    world = World()
    world.turn(FIRST, **way)
    second = world.turn(SECOND, **way)
    again = world.turn(SECOND, **way)
    assert again.conversation_id == second.conversation_id
    assert (again.known, again.extends) == (True, False)


@ways
def test_an_edited_last_message_goes_on_with_its_conversation(way):
    """It parts from the last turn right after the answer before."""
    world = World()
    world.turn(FIRST, **way)
    second = world.turn(SECOND, **way)
    edited = world.turn((*FIRST, "a1", "u2 edited"), **way)
    assert edited.conversation_id == second.conversation_id
    assert not edited.extends
    third = world.turn((*FIRST, "a1", "u2 edited", "a2", "u3"), **way)
    assert third == Named(second.conversation_id, known=True, extends=True)


@ways
def test_a_turn_that_failed_does_not_cut_the_conversation(way):
    """The client drops its message and asks something else of the same answer."""
    world = World()
    first = world.turn(FIRST, **way)
    world.end(world.ask((*FIRST, "a1", "too long a question"), **way))
    other = world.turn((*FIRST, "a1", "a shorter one"), **way)
    assert other == Named(first.conversation_id, known=True, extends=True)


def test_a_compacted_history_goes_on_only_under_the_clients_own_name():
    """Nothing but the first message is left of it."""
    compacted = ("system", "In short: ...", "a", "u4")
    world = World()
    named = world.turn(THIRD, named="C")
    assert world.turn(compacted, named="C").conversation_id == named.conversation_id == "C"
    for way in ({"scope": "S"}, {}):
        recognised = world.turn(THIRD, **way)
        assert world.turn(compacted, **way).conversation_id != recognised.conversation_id


def test_twins_are_told_apart_while_both_are_in_flight():
    """The same first question twice at once, under no id."""
    world = World()
    one, other = world.ask(FIRST), world.ask(FIRST)
    assert one.conversation_id != other.conversation_id
    world.end(one, other)
    left, right = (*FIRST, "a left", "u"), (*FIRST, "a right", "u")
    first, second = world.ask(left), world.ask(right)
    assert {first.conversation_id, second.conversation_id} == {
        one.conversation_id,
        other.conversation_id,
    }


def test_of_equal_branches_an_idle_one_is_taken_then_the_latest():
    """A turn in flight may still need its own."""
    world = World()
    twins = [world.ask(FIRST) for _ in range(3)]
    world.end(twins[0], twins[1])
    assert world.ask(SECOND).conversation_id == twins[1].conversation_id
    assert world.ask(SECOND).conversation_id == twins[0].conversation_id
    last = world.ask(SECOND)
    assert (last.conversation_id, last.awaits) == (twins[2].conversation_id, True)


def test_an_idle_branch_is_taken_before_one_used_later():
    """That one is in flight, and does not need a second turn."""
    recognition = Recognition(10)
    own, more = [b"o" * 16], [b"m" * 16, b"o" * 16]
    idle, busy = ("t", "m", "conv-idle"), ("t", "m", "conv-busy")
    recognition.began(idle, own)
    recognition.ended(idle)
    recognition.began(busy, own)
    assert recognition.name(("t", "m", "conv-new"), True, more).conversation_id == "conv-idle"


def test_a_named_conversation_has_four_branches():
    """C, then C~2 to C~4; the fifth at once takes the least recently used."""
    world = World()
    turns = [world.ask((f"agent {number}", "u"), named="C") for number in range(5)]
    assert [turn.conversation_id for turn in turns] == ["C", "C~2", "C~3", "C~4", "C"]
    assert [turn.known for turn in turns] == [False] * 4 + [True]
    world.end(*turns)
    assert world.recognition.branches("tenant", "model", "C") == ["C", "C~2", "C~3", "C~4"]
    # Each goes on with its own; only that of the first is lost.
    for number in (4, 3, 2, 1):
        turn = world.turn((f"agent {number}", "u", "a", "u"), named="C")
        assert turn.conversation_id == turns[number].conversation_id
        assert turn.extends


def test_the_deepest_common_point_chooses_the_branch():
    """An edited history goes on with the branch that has most of it, not the latest used."""
    world = World()
    one = world.ask(THIRD, named="C")
    other = world.ask(("system", "other", "a", "u"), named="C")
    world.end(one, other)
    edited = world.turn((*SECOND[:3], "u2 edited", "a", "u"), named="C")
    assert edited.conversation_id == "C"
    assert world.turn(("system", "new"), named="C").conversation_id == "C"
    assert world.turn(("system", "other", "a", "u"), named="C").conversation_id == "C~2"


def test_a_name_too_long_for_branches_has_one():
    """Ids have at most 256 bytes."""
    world = World()
    name = "é" * 128
    turns = [world.ask((f"agent {number}", "u"), named=name) for number in range(2)]
    assert [turn.conversation_id for turn in turns] == [name, name]


def test_a_turn_of_unknown_history_goes_on_with_what_its_client_names():
    """Without points a named conversation is itself, and nothing is recognised."""
    recognition = Recognition(10)
    key = ("t", "m", "C")
    assert recognition.name(key, False, []) == Named("C")
    recognition.began(key, [])
    assert recognition.name(key, False, []) == Named("C", known=True)
    assert recognition.name(("t", "m", "conv-1"), True, []) == Named("conv-1")


@pytest.mark.parametrize(
    ("tenant", "model"), [("other", "model"), ("tenant", "other"), ("tenantm", "odel")]
)
def test_nobody_goes_on_with_another_tenants_conversation(tenant, model):
    """Even where their digests are equal; and each knows its own names only."""
    world = World()
    mine = world.turn(FIRST)
    named = world.turn(FIRST, named="C")
    points = [digest(("", str(point))) for point in points_of(SECOND)]
    key = (tenant, model, "conv-new")
    assert world.recognition.name(key, True, points) == Named("conv-new")
    world.recognition.began(key, points)
    assert world.turn(SECOND) == Named(mine.conversation_id, known=True, extends=True)
    assert world.recognition.name((tenant, model, "C"), False, points) == Named("C")
    assert world.recognition.branches(tenant, model, named.conversation_id) == []


@ways
def test_a_new_leader_learns_conversations_from_what_engines_retain(way):
    """An inventory brings key and own digest; the next turn goes on, and turns in flight count."""
    world = World()
    first = world.turn(FIRST, **way)
    fork = (*FIRST, "a1", "fork")
    world.ask(fork, **way)
    name = way.get("named") or way.get("scope", "")
    own = digest((name, str(points_of(FIRST)[0])))
    second = World()
    second.minted = 100
    key = second.key(first.conversation_id)
    second.recognition.retained(key, own)
    assert second.ask(SECOND, **way) == Named(key[2], known=True, extends=True)
    # Told of the turn in flight first, the same turn is the other side of a fork.
    third = World()
    third.minted = 100
    third.recognition.began(key, [digest((name, str(point))) for point in points_of(fork)])
    third.recognition.retained(key, own)
    assert third.ask(SECOND, **way).conversation_id != key[2]


def test_what_is_retained_tells_whether_a_turn_goes_on_from_it():
    """A turn that left nothing behind is gone on from, as far as what is held goes."""
    world = World()
    key = world.key(world.turn(FIRST).conversation_id)
    world.recognition.retained(key, b"")
    assert world.turn(SECOND).extends
    world.recognition.retained(key, b"x" * 16)
    again = world.ask(SECOND)
    assert (again.conversation_id, again.extends) == (key[2], False)


def test_an_ended_conversation_is_forgotten():
    """Also while a turn of it is in flight, which still counts."""
    world = World()
    one = world.turn(FIRST)
    world.recognition.forget(world.key(one.conversation_id))
    assert len(world.recognition) == 0
    assert world.turn(SECOND).conversation_id != one.conversation_id
    running = world.ask(FIRST, named="C")
    world.recognition.forget(world.key("C"))
    assert world.ask(SECOND, named="C").conversation_id == "C~2"
    world.end(running)
    world.recognition.forget(world.key("never known"))
    world.recognition.ended(world.key("never known"))


def test_the_least_recently_used_conversation_is_forgotten_first():
    """State is bounded, and of what is forgotten nothing stays."""
    world = World(entries_max=3)
    ids = [world.turn((f"s{number}", "u"), scope="S").conversation_id for number in range(3)]
    grown = world.turn(("s0", "u", "a", "u"), scope="S")
    assert grown.conversation_id == ids[0]
    world.turn(("s3", "u"), scope="S")
    assert len(world.recognition) == 3
    left = world.recognition.branches("tenant", "model", "S")
    assert ids[1] not in left
    assert len(left) == 3
    assert world.turn(("s1", "u", "a", "u"), scope="S").conversation_id not in ids


def test_all_of_a_scope_is_listed_however_long_its_name():
    """A long scope is cut in its conversations' ids, not for those who ask for it."""
    world = World()
    scope = "é" * 128
    answer = world.turn(FIRST, scope=scope)
    assert len(answer.conversation_id.encode()) <= 256
    assert world.recognition.branches("tenant", "model", scope) == [answer.conversation_id]


def test_equal_histories_cost_reuse_and_no_time():
    """Fifty thousand turns at once with the same digests: as many conversations, few told apart."""
    recognition = Recognition(100_000)
    points = [bytes([number]) * 16 for number in range(50)]
    for number in range(50_000):
        recognition.began(("t", "m", f"conv-{number}"), points)
    assert not recognition.name(("t", "m", "conv-new"), True, points).known
    named = recognition.name(("t", "m", "conv-new"), True, [b"n" * 16, *points])
    assert (named.conversation_id, named.awaits) == ("conv-49999", True)
    times = []
    for _ in range(20):
        began = time.process_time()
        recognition.name(("t", "m", "conv-new"), True, points)
        times.append(time.process_time() - began)
    assert min(times) < 0.001  # 0.00005; a look at each of the conversations: 0.004


@pytest.mark.parametrize("point", [b"", b"x", b"x" * 1000])
def test_points_of_a_wrong_length_are_as_good_as_others(point):
    """They are cut, and nothing else."""
    recognition = Recognition(10)
    recognition.began(("t", "m", "C"), [point] * 100)
    assert recognition.name(("t", "m", "C"), False, [point] * 100).known
    assert recognition.name(("t", "m", "conv-1"), True, [point] * 100).known


# Any run


class Plain(NamedTuple):
    """A conversation as a list remembers it."""

    id: str
    chat: Chat
    retained: Chat
    in_flight: int


def begins(chat: Chat, answered_in: Chat) -> bool:
    """Tells whether a chat is one of those that another's points name, but not all of it."""
    return digest(chat) in points_of(answered_in)[1:]


class AnyRun(RuleBasedStateMachine):
    """Turns of any histories under one name, a scope and none, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.recognition = Recognition(1000)
        self.plain: list[Plain] = []
        self.minted = 0

    @rule(
        way=st.sampled_from(["named", "recognised"]),
        chat=st.lists(st.sampled_from(["u", "v", "a", "a2"]), min_size=0, max_size=7),
    )
    def ask(self, way: str, chat: list[str]) -> None:
        whole = (way, *chat)  # Digests are made under what the client named.
        points = points_of(whole)
        self.minted += 1
        key = ("t", "m", "C" if way == "named" else f"conv-{self.minted:032x}")
        named = self.recognition.name(key, way != "named", points)
        expected = self.expected(way == "named", key[2], whole, points)
        assert named.conversation_id == expected
        before = next((one for one in self.plain if one.id == expected), None)
        assert named.known == (before is not None)
        if before is not None:
            goes_on = before.chat != () and begins(before.chat, whole)
            retained = before.retained != () and begins(before.retained, whole)
            assert named.extends == (goes_on or retained)
            assert named.awaits == (goes_on and before.in_flight > 0)
            self.plain.remove(before)
        retained_chat = before.retained if before else ()
        in_flight = before.in_flight if before else 0
        self.plain.append(Plain(expected, whole, retained_chat, in_flight + 1))
        self.recognition.began(("t", "m", expected), points)

    def expected(self, named: bool, new: str, chat: Chat, points: Sequence[bytes]) -> str:
        mine = [one for one in self.plain if one.id.startswith("C") == named]
        return self.branch(mine, chat, points) if named else self.recognised(mine, points) or new

    def recognised(self, known: list[Plain], points: Sequence[bytes]) -> str | None:
        for depth, point in enumerate(points):
            going_on = [one for one in known if one.chat and digest(one.chat) == point]
            left = [one for one in known if one.chat and point in points_of(one.chat)[1:2]]
            fit = going_on if depth and going_on else [*going_on, *left]
            if not (depth and going_on):
                fit = [one for one in fit if not one.in_flight]
            if fit:
                idle = [one for one in fit if not one.in_flight]
                return max(idle or fit, key=self.plain.index).id
        return None

    def branch(self, known: list[Plain], chat: Chat, points: Sequence[bytes]) -> str:
        def parting(one: Plain) -> int:
            held = set(points_of(one.chat)) if one.chat else set()
            return next((depth for depth, at in enumerate(points) if at in held), len(points))

        def goes_on(one: Plain) -> bool:
            return one.chat != () and begins(one.chat, chat)

        fit = [one for one in known if not one.in_flight or goes_on(one)]
        if fit:
            fit.sort(key=self.plain.index)
            return max(
                fit, key=lambda o: (-parting(o), goes_on(o), not o.in_flight, fit.index(o))
            ).id
        taken = {one.id for one in known}
        free = [name for name in ("C", "C~2", "C~3", "C~4") if name not in taken]
        return free[0] if free else min(known, key=self.plain.index).id

    @precondition(lambda self: any(one.in_flight for one in self.plain))
    @rule(data=st.data(), retains=st.booleans())
    def end(self, data: st.DataObject, retains: bool) -> None:
        one = data.draw(st.sampled_from([one for one in self.plain if one.in_flight]))
        self.plain.remove(one)
        self.plain.append(one._replace(in_flight=one.in_flight - 1))
        self.recognition.ended(("t", "m", one.id))
        if retains and one.chat:
            self.retain(one)

    def retain(self, one: Plain) -> None:
        index = next(place for place, other in enumerate(self.plain) if other.id == one.id)
        self.plain.append(self.plain.pop(index)._replace(retained=one.chat))
        self.recognition.retained(("t", "m", one.id), digest(one.chat))

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.plain))
        self.recognition.forget(("t", "m", one.id))
        place = self.plain.index(one)
        if one.in_flight:
            self.plain[place] = one._replace(chat=(), retained=())
        else:
            del self.plain[place]

    @invariant()
    def as_many_are_known(self) -> None:
        assert len(self.recognition) == len(self.plain)


AnyRun.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnyRun = AnyRun.TestCase


def test_points_are_bounded():
    """A turn's points beyond the twentieth name nothing."""
    recognition = Recognition(10)
    points = [bytes([number]) * 16 for number in range(POINTS_MAX + 1)]
    recognition.began(("t", "m", "conv-1"), [points[POINTS_MAX]])
    recognition.ended(("t", "m", "conv-1"))
    assert not recognition.name(("t", "m", "conv-2"), True, points).known
    assert recognition.name(("t", "m", "conv-2"), True, points[1:]).known
