"""Which retentions decode gives up first: the outlook, then what was learned of returns."""

import itertools
import random

from kvturn_connector.shared_blocks import SharedBlocks
from kvturn_connector.victims import Outlook, Victims

SECOND_NS = 1_000_000_000


class Engine(Victims):
    """Retentions that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = SharedBlocks()
        self._block_ids = itertools.count()
        self._known: set[int] = set()

    def keep(self, number: int, blocks: int, turn: int, now_ns: int) -> None:
        """Adds a retention of so many blocks."""
        self.retained(number, turn, now_ns)
        if number in self._known:
            self._blocks.let_go(number)
        self._known.add(number)
        self._blocks.hold(number, list(itertools.islice(self._block_ids, blocks)))

    def give_up(self, blocks: int, now_ns: int) -> list[int]:
        """Returns what would be given up for so many blocks."""
        return self.choose(blocks, now_ns, self._blocks.freed_by((), lambda _: 1))


def retain(
    victims: Engine, number: int, *, at_s: float = 0, blocks: int = 10, turn: int = 1
) -> None:
    """Adds a retention."""
    victims.keep(number, blocks, turn, int(at_s * SECOND_NS))


def teach(victims: Engine, *, turn: int, returns: int, ends: int, age_s: float) -> None:
    """Lets so many retentions return at that age, and so many end unread at ten minutes."""
    for number in range(1_000_000, 1_000_000 + returns):
        retain(victims, number, turn=turn)
        victims.consumed(number, int(age_s * SECOND_NS))
    for number in range(2_000_000, 2_000_000 + ends):
        retain(victims, number, turn=turn)
        victims.ended(number, 600 * SECOND_NS)


def test_the_outlook_goes_before_everything_else() -> None:
    """Idle ones go first and expected ones last, whatever their age."""
    victims = Engine()
    for number, outlook in enumerate((Outlook.EXPECTED, Outlook.NORMAL, Outlook.IDLE)):
        retain(victims, number, at_s=number)
        victims.outlook(number, outlook, number * SECOND_NS)
    assert victims.give_up(25, 10 * SECOND_NS) == [2, 1, 0]
    victims.outlook(0, Outlook.IDLE, 10 * SECOND_NS)
    victims.outlook(2, Outlook.NORMAL, 10 * SECOND_NS)
    assert victims.give_up(15, 10 * SECOND_NS) == [0, 1]


def test_an_unknown_outlook_is_normal() -> None:
    """The value that no message names, and one that a newer lease service may send."""
    victims = Engine()
    for number, outlook in enumerate((Outlook.EXPECTED, 0, 99)):
        retain(victims, number)
        victims.outlook(number, outlook, 0)
    assert victims.give_up(20, SECOND_NS) == [1, 2]


def test_before_anything_is_known_the_priors_decide() -> None:
    """Later turns stay before first ones, the last minute before the last hour."""
    victims = Engine()
    for number, (age_s, turn) in enumerate([(3000, 9), (60, 1), (60, 2), (60, 9), (500, 9)]):
        retain(victims, number, at_s=3600 - age_s, turn=turn)
    assert victims.give_up(5 * 10, 3600 * SECOND_NS) == [0, 4, 1, 2, 3]


def test_no_more_is_given_up_than_is_wanted() -> None:
    """Those that the last victim makes needless are spared; all go if all are too few."""
    victims = Engine()
    retain(victims, 1, at_s=0, blocks=3)
    retain(victims, 2, at_s=100, blocks=50)
    retain(victims, 3, at_s=200, blocks=50)
    assert victims.give_up(0, 300 * SECOND_NS) == []
    assert victims.give_up(3, 300 * SECOND_NS) == [1]
    assert victims.give_up(40, 300 * SECOND_NS) == [2]
    assert victims.give_up(52, 300 * SECOND_NS) == [1, 2]
    assert victims.give_up(1_000, 300 * SECOND_NS) == [1, 2, 3]


def test_what_was_given_up_or_read_is_not_named_again() -> None:
    """Nor does anything hang on numbers that are not there (any more)."""
    victims = Engine()
    for number in range(3):
        retain(victims, number)
    victims.ended(0, SECOND_NS)
    victims.consumed(1, SECOND_NS)
    for number in (0, 1, 77):
        victims.ended(number, SECOND_NS)
        victims.consumed(number, SECOND_NS)
        victims.outlook(number, Outlook.IDLE, SECOND_NS)
    assert victims.give_up(100, SECOND_NS) == [2]
    assert len(victims) == 1


def test_classes_that_return_more_often_are_kept() -> None:
    """Later turns return nine times out of ten, first ones one time out of ten."""
    victims = Engine()
    teach(victims, turn=1, returns=20, ends=180, age_s=60)
    teach(victims, turn=4, returns=180, ends=20, age_s=60)
    retain(victims, 1, at_s=1000, turn=4)
    retain(victims, 2, at_s=1010, turn=1)
    assert victims.give_up(10, 1030 * SECOND_NS) == [2]


def test_one_that_is_due_is_kept_before_one_that_is_past_its_time() -> None:
    """Clients come back after a minute: at 40 s it is near, at 200 s it is over, at 5 s far."""
    victims = Engine()
    teach(victims, turn=1, returns=150, ends=150, age_s=60)
    for number, age_s in ((1, 5), (2, 40), (3, 200)):
        retain(victims, number, at_s=1000 - age_s)
    assert victims.give_up(30, 1000 * SECOND_NS) == [3, 1, 2]


def test_clients_that_outlast_the_others_heartbeats_are_kept() -> None:
    """Two of three clients go away and fall silent after 35 s; who heartbeats on comes back."""
    victims = Engine()
    for number in range(1_000, 1_600):
        retain(victims, number)
        victims.outlook(number, Outlook.EXPECTED, 0)
        if number % 3:
            victims.outlook(number, Outlook.IDLE, 35 * SECOND_NS)
            victims.ended(number, 40 * SECOND_NS)
        else:
            victims.consumed(number, 100 * SECOND_NS)
    for number, age_s in ((1, 60), (2, 10)):
        retain(victims, number, at_s=1000 - age_s)
        victims.outlook(number, Outlook.EXPECTED, (1000 - age_s) * SECOND_NS)
    assert victims.give_up(10, 1000 * SECOND_NS) == [2]


def test_a_turn_in_flight_is_no_reason_to_learn_that_silent_ones_stay_away() -> None:
    """Its retention is expected for the seconds until it is read; it returned from silence."""
    learned = []
    for announced in (False, True):
        victims = Engine()
        for number in range(1_000, 1_300):
            retain(victims, number, turn=1)
            if announced:
                victims.outlook(number, Outlook.EXPECTED, 60 * SECOND_NS)
            victims.consumed(number, 62 * SECOND_NS)
        for age_s in (5, 20, 50, 100, 200, 400):
            retain(victims, age_s, at_s=1000 - age_s)
        learned.append(victims.give_up(6 * 10, 1000 * SECOND_NS))
    assert learned[0] == learned[1]


def test_agents_that_heartbeat_and_return_at_once_are_learned_as_expected() -> None:
    """All are expected from their first second on and read after ten: at 30 s it is over."""
    victims = Engine()
    for number in range(1_000, 1_600):
        retain(victims, number)
        victims.outlook(number, Outlook.EXPECTED, SECOND_NS)
        if number % 2:
            victims.consumed(number, 10 * SECOND_NS)
        else:
            victims.ended(number, 300 * SECOND_NS)
    for number, age_s in ((1, 5), (2, 30)):
        retain(victims, number, at_s=1000 - age_s)
        victims.outlook(number, Outlook.EXPECTED, (1001 - age_s) * SECOND_NS)
    assert victims.give_up(10, 1000 * SECOND_NS) == [2]


def test_what_is_learned_follows_the_traffic() -> None:
    """First turns used to return and no longer do; second turns the other way round."""
    victims = Engine()
    for first, second in ((400, 0), (0, 30_000)):
        teach(victims, turn=1, returns=first, ends=second, age_s=60)
        teach(victims, turn=2, returns=second, ends=first, age_s=60)
        retain(victims, 1, at_s=1000, turn=1)
        retain(victims, 2, at_s=1000, turn=2)
        expected = [2] if first else [1]
        assert victims.give_up(10, 1030 * SECOND_NS) == expected
        victims.ended(1, 1000 * SECOND_NS)
        victims.ended(2, 1000 * SECOND_NS)


def test_the_same_history_gives_the_same_victims() -> None:
    """Two instances, one random history, in which everything that is kept is accounted for."""
    both = Engine(), Engine()
    choices = random.Random(7)
    kept: dict[int, int] = {}
    now_ns = 0
    for number in range(3_000):
        now_ns += choices.randrange(SECOND_NS)
        blocks, turn = choices.randrange(1, 20), choices.randrange(8)
        kept[number] = blocks
        some = choices.choice(list(kept))
        outlook = choices.choice(list(Outlook))
        wanted = choices.randrange(sum(kept.values())) if choices.random() < 0.2 else 0
        named = []
        for victims in both:
            victims.keep(number, blocks, turn, now_ns)
            victims.outlook(some, outlook, now_ns)
            named.append(victims.give_up(wanted, now_ns))
        assert named[0] == named[1]
        assert len(set(named[0])) == len(named[0])
        assert wanted <= sum(kept[victim] for victim in named[0])
        for victim in named[0]:
            del kept[victim]
            for victims in both:
                (victims.consumed if victim % 3 else victims.ended)(victim, now_ns)
        assert len(both[0]) == len(both[1]) == len(kept)
