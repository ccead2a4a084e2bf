"""Writes docs/api/grpc-*.md from the comments of protos/kvturn/v1/*.proto.

Run through scripts/gen_protos.sh, with grpcio-tools' Python. Argument: the output folder.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

PACKAGE = "kvturn.v1"
FOLDER = "kvturn/v1"
# Numbers of fields in descriptor.proto, of which paths to comments are made.
PACKAGE_NAME, MESSAGES, ENUMS, SERVICES = 2, 4, 5, 6
FIELDS, NESTED_MESSAGES, NESTED_ENUMS, VALUES, METHODS = 2, 3, 4, 2, 2


class Page:
    """The reference of one proto file. `homes` tells on which page each type is described."""

    def __init__(self, file: FileDescriptorProto, homes: dict[str, str]) -> None:
        self._file = file
        self._homes = homes
        self._comments = {
            tuple(place.path): comment(place.leading_comments)
            for place in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Yields the page."""
        name = Path(self._file.name).name
        yield f"# {name}"
        yield ""
        yield f"Generated from `protos/{self._file.name}` (`make proto`); do not edit."
        yield from ("", self._told(PACKAGE_NAME))
        yield from self._services()
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGES, index), "")
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUMS, index), "")

    def _told(self, *path: int) -> str:
        return self._comments.get(path, "")

    def _services(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield from ("", f"## {service.name}", "", self._told(SERVICES, index))
            for place, method in enumerate(service.method):
                yield from ("", f"### {service.name}.{method.name}", "", self._signature(method))
                yield from ("", self._told(SERVICES, index, METHODS, place))

    def _signature(self, method: MethodDescriptorProto) -> str:
        asked = ("stream of " if method.client_streaming else "") + self._link(method.input_type)
        told = ("stream of " if method.server_streaming else "") + self._link(method.output_type)
        return f"{asked} → {told}"

    def _message(
        self, message: DescriptorProto, path: tuple[int, ...], outer: str
    ) -> Iterator[str]:
        name = f"{outer}{message.name}"
        yield from ("", f"## {name}", "", self._told(*path))
        if message.field:
            yield from ("", "| field | type | |", "|---|---|---|")
        for index, field in enumerate(message.field):
            told = cell(self._told(*path, FIELDS, index))
            choice = ""
            if field.HasField("oneof_index"):
                choice = f"; one of `{message.oneof_decl[field.oneof_index].name}`"
            yield f"| `{field.name}` = {field.number} | {self._type(field)}{choice} | {told} |"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, NESTED_MESSAGES, index), f"{name}.")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, NESTED_ENUMS, index), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], outer: str) -> Iterator[str]:
        yield from ("", f"## {outer}{enum.name}", "", self._told(*path))
        yield from ("", "| value | |", "|---|---|")
        for index, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {cell(self._told(*path, VALUES, index))} |"

    def _type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            name = self._link(field.type_name)
        else:
            name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        return f"repeated {name}" if field.label == field.LABEL_REPEATED else name

    def _link(self, full_name: str) -> str:
        name = full_name.removeprefix(f".{PACKAGE}.")
        if name == full_name:
            return f"`{full_name.lstrip('.')}`"
        home = self._homes[name]
        page = "" if home == self._file.name else page_name(home)
        return f"[{name}]({page}#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"


def comment(text: str) -> str:
    """Returns a comment without the space that follows its slashes, errors as a paragraph."""
    lines = [line.removeprefix(" ") for line in text.rstrip().split("\n")]
    return "\n".join(lines).replace("\nErrors: ", "\n\nErrors: ")


def cell(text: str) -> str:
    """Returns a comment as one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def page_name(proto: str) -> str:
    """Returns the file name of a proto's page."""
    return f"grpc-{Path(proto).stem}.md"


def described(file: FileDescriptorProto) -> Iterator[str]:
    """Yields the names of a file's messages and enums, nested ones with their outer names."""
    pending = [(message, "") for message in file.message_type]
    while pending:
        message, outer = pending.pop()
        yield outer + message.name
        yield from (f"{outer}{message.name}.{enum.name}" for enum in message.enum_type)
        pending += [(nested, f"{outer}{message.name}.") for nested in message.nested_type]
    yield from (enum.name for enum in file.enum_type)


def parsed(protos: list[str]) -> FileDescriptorSet:
    """Returns the protos with their comments."""
    with tempfile.NamedTemporaryFile(suffix=".binpb") as out:
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos"]
        options = ["--include_source_info", f"--descriptor_set_out={out.name}"]
        subprocess.run([*command, *options, *protos], check=True)
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


def main() -> None:
    """Writes one page for each proto file."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    files = parsed([str(path) for path in sorted(Path("protos", FOLDER).glob("*.proto"))]).file
    homes = {name: file.name for file in files for name in described(file)}
    for file in files:
        text = "\n".join(Page(file, homes).lines())
        (out / page_name(file.name)).write_text(text + "\n")


if __name__ == "__main__":
    main()
