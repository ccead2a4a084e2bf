"""Which endpoint of the lease service a client asks, by what it has heard of them."""

from kvturn.leader import Leader

A, B, C = "a:1", "b:1", "c:1"


def asked(leader: Leader) -> list[str]:
    """Whom one question would go to, one after the other, if nobody answered it."""
    order: list[str] = []
    while (endpoint := leader.next(order)) is not None:
        order.append(endpoint)
    return order


def test_the_first_given_is_asked_first_and_everybody_is_probed() -> None:
    """Nothing is known yet; an endpoint given twice is one."""
    leader = Leader([A, B, A])
    assert asked(leader) == [A, B]
    assert (leader.known, leader.doubted) == ("", [A, B])


def test_one_that_answered_as_leader_is_kept_to() -> None:
    """No more probes, and the others come after it in their order."""
    leader = Leader([A, B, C])
    leader.leads(B, 1)
    assert asked(leader) == [B, C, A]
    assert (leader.known, leader.doubted) == (B, [])


def test_a_standby_passes_on_to_the_leader_it_names() -> None:
    """Which was not next in line."""
    leader = Leader([A, B, C])
    leader.stands_by(A, C, 1)
    assert leader.next([A]) == C
    assert leader.known == ""  # C has said nothing yet.


def test_a_leader_that_was_not_given_is_never_asked() -> None:
    """Nor one that names itself while it stands by: the next one is."""
    for named in ("evil:1", "", A):
        leader = Leader([A, B])
        leader.stands_by(A, named, 1)
        assert asked(leader) == [B, A]


def test_a_standby_does_not_talk_a_client_out_of_a_leader_that_answers() -> None:
    """Its news is older."""
    leader = Leader([A, B, C])
    leader.leads(B, 1)
    leader.stands_by(C, A, 2)
    assert leader.known == B


def test_standbys_that_name_each_other_end_a_question_after_one_round() -> None:
    """Nobody leads for now; each is asked once."""
    leader, tried = Leader([A, B]), list[str]()
    while (endpoint := leader.next(tried)) is not None:
        tried.append(endpoint)
        leader.stands_by(endpoint, B if endpoint == A else A, 1)
    assert tried == [A, B]
    assert leader.doubted == [A, B]


def test_one_that_cannot_be_connected_to_is_asked_last() -> None:
    """It fails fast, so it stays in the round: it may be back."""
    leader = Leader([A, B])
    leader.leads(A, 1)
    leader.lost(A)
    assert asked(leader) == [B, A]
    assert (leader.known, leader.doubted) == ("", [A, B])


def test_a_frozen_leader_is_not_asked_until_it_has_answered_a_probe() -> None:
    """Nor when a standby, which does not know better, still names it."""
    leader = Leader([A, B])
    leader.leads(A, 1)
    leader.silent(A, asked_ns=2)
    assert asked(leader) == [B]
    leader.stands_by(B, A, 3)
    assert asked(leader) == [B]
    assert leader.doubted == [A, B]
    leader.answers(A, 4)
    assert asked(leader) == [A, B]


def test_a_single_endpoint_that_is_frozen_is_not_asked_either() -> None:
    """Then nobody is, and the turn does not wait at all."""
    leader = Leader([A])
    leader.leads(A, 1)
    leader.silent(A, asked_ns=2)
    assert asked(leader) == []
    leader.claims(A, 3)
    assert (asked(leader), leader.known) == ([A], A)


def test_silence_on_one_question_is_none_if_another_was_answered_meanwhile() -> None:
    """A slow answer is no reason to leave the leader."""
    leader = Leader([A, B])
    leader.leads(A, 5)
    leader.silent(A, asked_ns=5)
    assert leader.known == A
    leader.silent(A, asked_ns=6)
    assert leader.known == ""


def test_a_silent_one_is_probed_also_while_another_leads() -> None:
    """So that it can be asked again when that other one is gone."""
    leader = Leader([A, B])
    leader.silent(A, asked_ns=1)
    leader.leads(B, 2)
    assert leader.doubted == [A]
    leader.lost(A)  # What does not answer may refuse connections, too.
    assert (asked(leader), leader.doubted) == ([B], [A])
    leader.answers(A, 3)
    assert (asked(leader), leader.doubted) == ([B, A], [])


def test_one_that_fell_silent_or_was_lost_is_broken_until_it_is_heard() -> None:
    """Then it is probed over a new connection; the old one may be dead, or wait to reconnect."""
    leader = Leader([A, B, C])
    leader.leads(C, 1)
    leader.silent(A, asked_ns=2)
    leader.lost(B)
    assert [leader.is_broken(one) for one in (A, B, C)] == [True, True, False]
    leader.stands_by(A, "", 3)
    leader.leads(B, 4)
    assert not any(leader.is_broken(one) for one in (A, B, C))


def test_one_that_wakes_up_as_leader_does_not_replace_the_one_that_answers() -> None:
    """It was frozen, another was elected, and it has not noticed yet."""
    leader = Leader([A, B])
    leader.leads(A, 1)
    leader.silent(A, asked_ns=2)
    leader.leads(B, 3)
    leader.claims(A, 4)
    assert leader.known == B
    assert asked(leader) == [B, A]


def test_leaders_are_counted_also_one_that_may_have_started_anew() -> None:
    """A broken connection may mean a restart; silence and doubt do not."""
    leader = Leader([A, B])
    leader.leads(A, 1)
    leader.silent(A, asked_ns=2)
    leader.doubt(A)
    leader.leads(A, 3)
    assert leader.changes == 1
    leader.leads(B, 4)
    assert leader.changes == 2
    leader.lost(B)
    leader.leads(B, 5)
    assert leader.changes == 3


def test_doubt_asks_everybody_and_changes_nothing_else() -> None:
    """Heartbeats go unanswered: the leader is still asked first, and probed with the rest."""
    leader = Leader([A, B])
    leader.leads(B, 1)
    leader.doubt(A)
    assert leader.known == B
    leader.doubt(B)
    assert (leader.known, asked(leader), leader.doubted) == ("", [B, A], [A, B])
    leader.claims(B, 2)
    assert leader.known == B
