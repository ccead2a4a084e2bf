"""The demo's conversation: which messages each turn sends. Pure.

A reader is handed a licence piece by piece and asked about it, so that the history grows from a
few hundred to a few thousand tokens. Then the same conversation goes on as real ones do: an agent
compacts its history, a user edits an earlier message, asks again for an answer, and comes back
after the end.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvturn_cli.turn import Message

Kind = Literal["growing", "compacted", "edited", "regenerate", "after_end"]

SYSTEM = """\
You are a careful reader of contracts and licences. People hand you long texts piece by piece and \
ask short questions about them. Read every piece in full before you answer. Answer in plain \
English, in one or two short sentences, as you would to a colleague who has no time and no law \
degree. Name the section that your answer rests on. When the text leaves a question open, say so \
and do not guess; when two sections pull in different directions, say which one is more specific. \
Never quote more than ten words in a row. Do not give legal advice: say what the text says, not \
what one should do about it. Keep to the words that the text itself uses for its own concepts, so \
that a contributor stays a contributor and a derivative work stays a derivative work. If a later \
piece changes what you said about an earlier one, say so at the start of your next answer."""

QUESTIONS = (
    "Here is the beginning of a licence. In one sentence: what may I do with the work?",
    "Here is the next section. What must I hand on together with a copy?",
    "The text goes on. Who keeps the right to the trade marks?",
    "Two more sections. Is there any warranty, and who bears the risk?",
    "The last numbered section. May I charge money for support?",
    "And this is the appendix. What do I have to add to my own files?",
)

SUMMARY = """\
Summary of the conversation so far, which replaces it: the licence under discussion lets anyone \
reproduce the work, prepare derivative works of it, display, perform, sublicense and distribute \
it, in source or object form, for ever, worldwide and free of charge (section 2), and grants a \
patent licence that ends for whoever sues over the work (section 3). Whoever passes the work on \
must hand on a copy of the licence, mark the files that were changed, keep the notices of \
copyright, patents, trade marks and attribution, and carry along the NOTICE file where there is \
one (section 4). What is submitted to the work comes under the same terms unless said otherwise \
(section 5). Names and trade marks stay with their owner (section 6). The work comes as it is: \
there is no warranty (section 7), and nobody is liable for damages (section 8). Anyone may charge \
for support or warranty, but only on their own behalf and at their own risk (section 9). The \
reader wants short answers and the number of the section. The reader works at a company that \
ships the work inside a closed product and has changed about ten of its files."""

EDIT = ("changed about ten of its files", "changed none of its files")


@dataclass(frozen=True)
class ScriptedTurn:
    """One turn of the script."""

    kind: Kind
    """What the turn does with the history."""
    messages: Callable[[Sequence[Message]], list[Message]]
    """From the history, replies included, to the messages to send."""


def pieces(licence: str) -> list[str]:
    """Cuts the Apache License into as many pieces as there are questions, in order.

    Raises ValueError for a text without the numbered sections 1 to 9 and an appendix.
    """
    text = "\n".join(line.strip() for line in licence.splitlines())
    starts = []
    for head in (
        "4. Redistribution.",
        "5. Submission",
        "7. Disclaimer",
        "9. Accepting",
        "APPENDIX",
    ):
        found = re.search(rf"^{re.escape(head)}", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"the licence has no line that begins with {head!r}")
        starts.append(found.start())
    bounds = [0, *starts, len(text)]
    return [text[a:b].strip() for a, b in itertools.pairwise(bounds)]


def user(text: str) -> Message:
    """Returns a message of the user."""
    return {"role": "user", "content": text}


def add(text: str) -> Callable[[Sequence[Message]], list[Message]]:
    """Returns the step that goes on with one more message of the user."""
    return lambda history: [*history, user(text)]


def compact(history: Sequence[Message]) -> list[Message]:
    """Replaces all but the system message by a summary, as agents do when a context fills up."""
    question = "May the company keep its changes to itself?"
    return [history[0], user(f"{SUMMARY}\n\n{question}")]


def edit(history: Sequence[Message]) -> list[Message]:
    """Changes a few words near the end of an earlier message and goes on."""
    before, after = EDIT
    changed = {**history[1], "content": history[1]["content"].replace(before, after)}
    return [history[0], changed, *history[2:], user("Does that change your answer, and why?")]


def regenerate(history: Sequence[Message]) -> list[Message]:
    """Drops the last reply: the same prompt once more."""
    return list(history[:-1])


def script(licence: str) -> list[ScriptedTurn]:
    """Returns the turns of the demo, in order. Raises ValueError (see pieces)."""
    texts = [
        f"{question}\n\n{piece}" for question, piece in zip(QUESTIONS, pieces(licence), strict=True)
    ]
    opening: Message = {"role": "system", "content": SYSTEM}
    first = ScriptedTurn("growing", lambda _: [opening, user(texts[0])])
    return [
        first,
        *(ScriptedTurn("growing", add(text)) for text in texts[1:]),
        ScriptedTurn("compacted", compact),
        ScriptedTurn("edited", edit),
        ScriptedTurn("regenerate", regenerate),
        ScriptedTurn("after_end", add("Thank you. One last thing: which section was the longest?")),
    ]
