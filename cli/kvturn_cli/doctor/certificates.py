"""Certificates: how long those are valid that servers show."""

from collections.abc import Iterator

from kvturn.tls import ending
from kvturn_cli.doctor.facts import Facts
from kvturn_cli.doctor.finding import Finding, counted, ok, problem, warning

DAY_S = 86_400.0
_WHY = "Past its end nobody who checks it connects: turns fail, or are recomputed."
_FIX = "replace the files of --tls-cert and --tls-key, or vLLM's; kvturn reads its own anew"


def findings(facts: Facts) -> Iterator[Finding]:
    """Judges each, and tells the first end of those that are in order."""
    lasting = []
    for one in facts.certificates:
        said = ending(one.left_s)
        if not said:
            lasting.append(one.left_s)
            continue
        judged = warning if one.left_s > 0 else problem
        yield judged("tls.certificate", f"{one.name}: its certificate {said}", _WHY, _FIX)
    if lasting:
        seen = f"{counted(len(lasting), 'certificate')}, the first ends in"
        yield ok("tls.certificate", f"{seen} {min(lasting) / DAY_S:.0f} days")
