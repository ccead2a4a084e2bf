"""Writes docs/api/http.md from docs/api/openapi.yaml. Argument: the file to write."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SOURCE = Path(__file__).resolve().parent.parent / "docs" / "api" / "openapi.yaml"
METHODS = ("get", "post", "put", "delete")


class Reference:
    """The reference of one OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def lines(self) -> Iterator[str]:
        """Yields the page."""
        yield from ("# HTTP API of the router", "")
        yield "Generated from [openapi.yaml](openapi.yaml) (`make proto`); do not edit."
        yield from ("", self._document["info"]["description"].strip())
        for tag in self._document["tags"]:
            yield from ("", f"## {tag['name'].capitalize()}", "", tag["description"])
            for path, item in self._document["paths"].items():
                for method in METHODS:
                    if tag["name"] in item.get(method, {}).get("tags", ()):
                        yield from self._operation(path, method, item)
        yield from ("", "## Headers of turns' answers", "", "| header | type | |", "|---|---|---|")
        turn = self._document["paths"]["/v1/chat/completions"]["post"]
        for name, given in turn["responses"]["200"]["headers"].items():
            header = self._found(given)
            told = cell(header["description"])
            yield f"| `{name}` | {self._kind(header['schema'])} | {told} |"
        yield from ("", "## Schemas")
        for name, schema in self._document["components"]["schemas"].items():
            yield from self._schema(name, schema)

    def _operation(self, path: str, method: str, item: Mapping[str, Any]) -> Iterator[str]:
        operation = item[method]
        yield from ("", f"### {method.upper()} {path}", "", f"{operation['summary']}.")
        if "description" in operation:
            yield from ("", operation["description"].strip())
        if operation.get("security") and {} not in operation["security"]:
            yield from ("", "Needs an operator's key.")
        yield from self._parameters([*item.get("parameters", ()), *operation.get("parameters", ())])
        if "requestBody" in operation:
            body = self._found(operation["requestBody"])["content"]["application/json"]["schema"]
            yield from ("", f"Body: {self._kind(body)}")
            yield from self._members(body)
        yield from ("", "| status | | body |", "|---|---|---|")
        for status, given in operation["responses"].items():
            response = self._found(given)
            yield f"| {status} | {cell(response['description'])} | {self._content(response)} |"

    def _parameters(self, given: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        if given:
            yield from ("", "| parameter | in | type | |", "|---|---|---|---|")
        for parameter in map(self._found, given):
            need = "" if parameter.get("required") else ", optional"
            kind = self._kind(parameter["schema"])
            told = cell(parameter.get("description", ""))
            yield f"| `{parameter['name']}` | {parameter['in']} | {kind}{need} | {told} |"

    def _content(self, response: Mapping[str, Any]) -> str:
        kinds = []
        for media, content in response.get("content", {}).items():
            kind = self._kind(content["schema"])
            kinds.append(kind if media == "application/json" else f"`{media}`")
        return ", or ".join(kinds)

    def _schema(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        yield from ("", f"### {name}")
        if "description" in schema:
            yield from ("", schema["description"].strip())
        parts = [part for part in schema.get("allOf", ()) if "$ref" in part]
        for part in parts:
            yield from ("", f"All of {self._kind(part)}, and:")
        if schema.get("enum"):
            yield from ("", ", ".join(f"`{value}`" for value in schema["enum"]))
        for part in (schema, *schema.get("allOf", ())):
            yield from self._members(part)

    def _members(self, schema: Mapping[str, Any]) -> Iterator[str]:
        if "$ref" in schema or not schema.get("properties"):
            return
        yield from ("", "| member | type | |", "|---|---|---|")
        needed = schema.get("required", ())
        for name, member in schema["properties"].items():
            need = "" if name in needed else ", optional"
            told = cell(member.get("description", ""))
            yield f"| `{name}` | {self._kind(member)}{need} | {told} |"

    def _kind(self, schema: Mapping[str, Any] | bool) -> str:
        if isinstance(schema, bool):
            return "any JSON"
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        if "oneOf" in schema:
            return " or ".join(self._kind(part) for part in schema["oneOf"])
        kind = schema.get("type", "any")
        if isinstance(kind, list):
            return " or ".join(kind)
        if kind == "array" and "items" in schema:
            return f"array of {self._kind(schema['items'])}"
        bounds = [
            f"{word} {schema[key]}"
            for key, word in (("minimum", "from"), ("maximum", "to"))
            if schema.get(key)
        ]
        return " ".join([kind, *bounds])

    def _found(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Any = given
        while "$ref" in found:
            reference = found["$ref"]
            found = self._document
            for key in reference.removeprefix("#/").split("/"):
                found = found[key]
        return found


def cell(text: str) -> str:
    """Returns a text as one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """Returns the reference."""
    return "\n".join(Reference(yaml.safe_load(SOURCE.read_text())).lines()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
