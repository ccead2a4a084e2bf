"""Finds the conversations that a name means: a conversation, or all those of a scope."""

import argparse

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.arguments import Parser, name, tenant
from kvturn_cli.lease_connection import LeaseConnection, NoAnswer

LISTED_MAX = 1_000
"""Most conversations that the lease service lists at once."""
_NAMED_MAX = 5


def add_name_flags(parser: Parser) -> None:
    """Adds the flags that tell conversations of the same id apart."""
    add = parser.add_argument
    add(
        "--model",
        type=name,
        variable=False,
        help="the conversation's model; needed if several have its id",
    )
    add("--tenant", type=tenant, variable=False, help="its tenant; needed if several have its id")


async def conversations_named(
    connection: LeaseConnection, args: argparse.Namespace
) -> list[lease_pb2.Conversation]:
    """Returns what `args` name (conversation, --model, --tenant): one, or all those of a scope.

    All have the same tenant and model; of a scope the latest LISTED_MAX come. Raises NoAnswer if
    none are known, or those of several tenants or models.
    """
    named: str = args.conversation
    request = lease_pb2.ListConversationsRequest(
        conversation_id=named,
        model=args.model or "",
        tenant=args.tenant or "",
        page_size=LISTED_MAX,
    )
    answer = await connection.ask(lambda stub: stub.ListConversations, request)
    # Asked for the tenant "", which is one too, the lease service lists all.
    found = [each for each in answer.conversations if args.tenant in (None, each.key.tenant)]
    owners = sorted({(each.key.tenant, each.key.model) for each in found})
    if not owners:
        raise NoAnswer(_unknown(args))
    if len(owners) > 1:
        raise NoAnswer(_ambiguous(named, owners))
    return found


async def conversation_named(
    connection: LeaseConnection, args: argparse.Namespace
) -> common_pb2.ConversationKey:
    """Returns the name of the one conversation, or scope, of conversations_named()."""
    found = await conversations_named(connection, args)
    key = found[0].key
    return common_pb2.ConversationKey(
        tenant=key.tenant, model=key.model, conversation_id=args.conversation
    )


def _unknown(args: argparse.Namespace) -> str:
    of = "".join(
        f" of {flag} {value!r}"
        for flag, value in (("model", args.model), ("tenant", args.tenant))
        if value is not None
    )
    return (
        f"the lease service knows no conversation {args.conversation!r}{of};"
        " kvturn conversations lists those that it knows"
    )


def _ambiguous(named: str, owners: list[tuple[str, str]]) -> str:
    ways = [
        " ".join(f"--{flag} {value!r}" for flag, value in zip(flags, owner, strict=True))
        for flags, owner in ((("tenant", "model"), owner) for owner in owners[:_NAMED_MAX])
    ]
    more = ", ..." if len(owners) > _NAMED_MAX else ""
    return (
        f"{named!r} is the name of {len(owners)} conversations; give one of {', '.join(ways)}{more}"
    )
