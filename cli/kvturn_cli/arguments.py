"""Command-line flags with KVTURN_* twins, and errors of one line.

Every flag --some-name of `kvturn up` can be given as KVTURN_UP_SOME_NAME instead; the flag wins.
Commands that ask the lease service share the variables KVTURN_OPERATOR_*, see lease_connection.py.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from kvturn.address import addresses, is_host
from kvturn.spelling import one_line, stray_variables, unknown_variable, with_flag_meant

NAME_BYTES_MAX = 256


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, where there is something to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser whose defaults come from the environment and whose errors fit a line."""

    def __init__(self, prog: str, description: str, variables: str = "") -> None:
        """`variables`: what those of the flags begin with; by default the command's name."""
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=_HelpFormatter
        )
        self._prefix = variables or f"{prog.replace(' ', '_').upper()}_"
        self._variables: dict[str, str] = {}

    def add_argument(self, *names: Any, variable: bool = True, **settings: Any) -> argparse.Action:
        """Adds a flag; its default is the KVTURN_* variable's value where that is set.

        Without `variable` it has none.
        """
        action = super().add_argument(*names, **settings)
        flag = names[0]
        if not variable or not isinstance(flag, str) or not flag.startswith("--"):
            return action
        return self._with_variable(action, flag)

    def _with_variable(self, action: argparse.Action, flag: str) -> argparse.Action:
        variable = f"{self._prefix}{flag[2:].replace('-', '_').upper()}"
        self._variables[variable] = flag
        text = os.environ.get(variable, "")
        if text:
            action.default = self._from_environment(action, variable, text)
            action.required = False
        return action

    def _from_environment(self, action: argparse.Action, variable: str, text: str) -> Any:
        """Returns the variable's value, refused by the variable's name when it is wrong."""
        if isinstance(action, argparse._StoreTrueAction):
            if text not in ("0", "1"):
                self.error(f"{variable}={text}: must be 0 or 1")
            return text == "1"
        try:
            value = self._get_value(action, text)
        except argparse.ArgumentError as error:
            self.error(f"{variable}={text}: {error.message}")
        return [value] if isinstance(action, argparse._AppendAction) else value

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads the flags, once no variable of this command is misspelt."""
        parsed = super().parse_known_args(args, namespace)
        problem = unknown_variable(self._prefix, self._variables, os.environ)
        if problem:
            self.error(problem)
        return parsed

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads the flags, and warns of variables that were probably meant for us."""
        parsed = super().parse_args(args, namespace)
        stray = stray_variables(os.environ)
        if stray:
            print(f"{self.prog}: warning: {stray}", file=sys.stderr)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Prints one line to stderr and exits with code 2."""
        message = with_flag_meant(message, self._option_string_actions).removeprefix("argument ")
        print(f"{self.prog}: {one_line(message)} (see --help)", file=sys.stderr)
        sys.exit(2)


def _whole(text: str) -> int:
    """Returns the whole number of 0 or more that a text is, -1 if none that fits 64 bits."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1


def port(text: str) -> int:
    """Reads a TCP port, 0 to 65535; 0 means any free one."""
    if not 0 <= _whole(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 0 to 65535")
    return int(text)


def positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def name(text: str) -> str:
    """Reads a name of something: 1 to 256 bytes."""
    size = len(text.encode())
    if not 1 <= size <= NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"must have 1 to {NAME_BYTES_MAX} bytes, not {size}")
    return text


def tenant(text: str) -> str:
    """Reads a tenant's name, which may be empty."""
    return name(text) if text else text


def host(text: str) -> str:
    """Reads an address, or a name, to listen on."""
    if not is_host(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address or name of this machine")
    return text


def base_url(text: str) -> str:
    """Reads where an HTTP API is, http://HOST:PORT; a /v1 at its end is left out."""
    try:
        parts = urlsplit(text)
        port_number = parts.port
    except ValueError:
        parts, port_number = urlsplit(""), None
    if (
        parts.scheme not in ("http", "https")
        or port_number == 0
        or not is_host(parts.hostname or "")
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is no http://HOST:PORT or https://HOST:PORT")
    if parts.query or parts.fragment or parts.username is not None:
        raise argparse.ArgumentTypeError(f"{text!r} must have no query and no user")
    if not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} must have no blanks")
    return text.rstrip("/").removesuffix("/v1")


def endpoints(text: str) -> tuple[str, ...]:
    """Reads HOST:PORT, or several with commas between."""
    try:
        return addresses(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def at_most(most: int) -> Callable[[str], int]:
    """Returns what reads a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if not 1 <= _whole(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Reads a time in seconds, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
