"""Who may see what of the router: operators all, clients what is their own tenant's."""

from collections.abc import Mapping

from kvturn_router.errors import TurnError, bad_field
from kvturn_router.request.intake import Intake
from kvturn_router.request.keys import ApiKeys, operator_of


class Viewers:
    """Judges those who want to see and change nothing.

    `admin_keys` are operators', None for none. Where clients need no key, anybody
    who reaches the router may see the engines; and where nothing tells tenants
    apart for certain and nobody is an operator, all conversations.
    """

    def __init__(self, intake: Intake, admin_keys: ApiKeys | None) -> None:
        self._intake = intake
        self._admin_keys = admin_keys
        self._engines_open = intake.keys is None
        self._conversations_open = (
            intake.keys is None and intake.tenant_header is None and admin_keys is None
        )

    def see_engines(self, headers: Mapping[str, str]) -> None:
        """Returns if the caller may see engines, and all that is of no tenant. Raises TurnError."""
        if not self._engines_open:
            operator_of(self._admin_keys, headers)

    def sees_all(self, headers: Mapping[str, str]) -> bool:
        """Tells whether the caller may see every tenant's conversations."""
        return self._conversations_open or self.is_operator(headers)

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Tells whether the caller brings an operator's key."""
        return self._admin_keys is not None and self._admin_keys.knows(headers)

    def tenant_seen(self, headers: Mapping[str, str], named: str | None) -> str | None:
        """Returns the tenant whose conversations the caller sees, None for all tenants.

        `named` is whom the caller asks for, None for whomever it may see. Raises
        TurnError: 401 without a key where one is needed, 403 for another's.
        """
        if self.sees_all(headers):
            return named
        own = self._intake.tenant(headers)
        if named not in (None, own):
            raise TurnError(
                403,
                "Another tenant's conversations are shown to operators only: send a key of "
                "--admin-keys-file, or leave out tenant.",
                reason="TENANT_FORBIDDEN",
            )
        return own

    def tenant_of_one(self, headers: Mapping[str, str], named: str | None) -> str:
        """Returns the tenant of one conversation that the caller asks for. Raises TurnError."""
        seen = self.tenant_seen(headers, named)
        if seen is not None:
            return seen
        if self.is_operator(headers):
            raise bad_field("tenant", "An operator must say whose it is: &tenant=NAME.")
        return self._intake.tenant(headers)
