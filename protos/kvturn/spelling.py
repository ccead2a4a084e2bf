"""What a person may have meant by a name that is none: flags, variables, commands."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_OURS = "KVTURN_"
_UNKNOWN_FLAGS = "unrecognized arguments: "  # argparse's words
_LIKENESS_MIN = 0.5
_LINE_MAX = 1000
"""Characters of a message; a path, the longest that is quoted in good faith, rarely has so many."""

COMMANDS = ("chat", "demo", "down", "lease", "operator", "otlp", "router", "up")
"""Whose settings are also variables: those of `kvturn up` begin with KVTURN_UP_. Commands for
operators share those that begin with KVTURN_OPERATOR_."""
_OTHERS = ("KVTURN_ETCD", "KVTURN_MULTI_TURN_BENCHMARK", "KVTURN_TRACE")
"""No command's: which etcd to run; the last two are of a checkout's tests and benchmarks."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most like this one, "" if none is like it."""
    return next(iter(difflib.get_close_matches(name, sorted(known), 1, _LIKENESS_MIN)), "")


def meant(name: str, known: Iterable[str]) -> str:
    """Returns the question after what was meant, to follow a message; "" for no idea."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def with_flag_meant(message: str, flags: Iterable[str]) -> str:
    """Returns argparse's message, if it is about an unknown flag with the one that was meant."""
    if not message.startswith(_UNKNOWN_FLAGS):
        return message
    unknown = message.removeprefix(_UNKNOWN_FLAGS).partition(" ")[0].partition("=")[0]
    return message + (meant(unknown, flags) if unknown.startswith("-") else "")


def unknown_variable(prefix: str, flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Returns what to say of a variable with that beginning that is no setting; "" for none.

    A misspelt variable would be a setting that silently does not hold. `flags` has the variables
    that there are, each with its flag.
    """
    for name in sorted(environ):
        if name.startswith(prefix) and name not in flags:
            found = nearest(name, flags)
            hint = f"; did you mean {found} ({flags[found]})?" if found else ""
            return f"{name} is not a setting{hint}"
    return ""


def unusable(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns what to say of an argument, or a variable of ours, that nothing takes; "" for none.

    That is text that is no UTF-8, which nobody can be sent or shown, and `--flag=--`, for which
    argparse gives no text at all.
    """
    for text in arguments:
        if text.startswith("--") and text.endswith("=--"):
            return f"{one_line(text)}: -- is no value; give another"
    given = [(repr(text), text) for text in arguments]
    given += [(name, text) for name, text in environ.items() if name.startswith(_OURS)]
    for name, text in given:
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{name} is not UTF-8; give names and files in UTF-8"
    return ""


def one_line(message: str) -> str:
    """Returns a message that may quote anything as one line of bounded length.

    What is not printable is shown as an escape, and of what is long the middle is left out.
    """
    if not message.isprintable():
        message = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode()
            for each in message
        )
    if len(message) <= _LINE_MAX:
        return message
    return f"{message[: _LINE_MAX // 2]} ... {message[-_LINE_MAX // 2 :]}"


def stray_variables(environ: Mapping[str, str]) -> str:
    """Returns the warning of variables that look like ours and are nobody's; "" for none."""
    prefixes = [f"{_OURS}{command.upper()}_" for command in COMMANDS]
    stray = [
        name
        for name in sorted(environ)
        if name.startswith(_OURS) and name not in _OTHERS and not name.startswith(tuple(prefixes))
    ]
    if not stray:
        return ""
    known = ", ".join(f"{prefix}..." for prefix in prefixes)
    return f"{', '.join(stray)}: no setting of kvturn; its variables are {known} and {_OTHERS[0]}"
