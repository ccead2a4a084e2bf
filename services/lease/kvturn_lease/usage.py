"""How much an engine or a tenant holds, against its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvturn_lease.lease import Lease


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that one holder may have; each above 0."""

    leases: int
    blocks: int
    tokens: int


class Usage:
    """Leases, blocks and tokens of one holder."""

    __slots__ = ("blocks", "leases", "tokens")

    def __init__(self) -> None:
        self.leases = 0
        self.blocks = 0
        self.tokens = 0

    def add(self, lease: Lease) -> None:
        """Counts a lease in."""
        self.leases += 1
        self.blocks += lease.block_count
        self.tokens += lease.token_count

    def remove(self, lease: Lease) -> None:
        """Counts a lease out that was counted in."""
        self.leases -= 1
        self.blocks -= lease.block_count
        self.tokens -= lease.token_count
        assert min(self.leases, self.blocks, self.tokens) >= 0

    def excess(self, limits: Limits, leases: int, blocks: int, tokens: int) -> str | None:
        """Returns what would be exceeded with so much more: LEASES, BLOCKS, TOKENS or None."""
        if self.leases + leases > limits.leases:
            return "LEASES"
        if self.blocks + blocks > limits.blocks:
            return "BLOCKS"
        if self.tokens + tokens > limits.tokens:
            return "TOKENS"
        return None


class Tenants:
    """What tenants hold; only those that hold something are in memory."""

    def __init__(self) -> None:
        self._usage: dict[str, Usage] = {}
        self._none = Usage()

    def __len__(self) -> int:
        return len(self._usage)

    def of(self, tenant: str) -> Usage:
        """Returns what a tenant holds, to be read only."""
        return self._usage.get(tenant, self._none)

    def add(self, lease: Lease) -> None:
        """Counts a lease in for its conversation's tenant."""
        self._usage.setdefault(lease.conversation.key.tenant, Usage()).add(lease)

    def remove(self, lease: Lease) -> None:
        """Counts it out."""
        tenant = lease.conversation.key.tenant
        usage = self._usage[tenant]
        usage.remove(lease)
        if usage.leases == 0:
            del self._usage[tenant]
