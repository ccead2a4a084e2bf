"""The API key that the router itself shows engines."""

from pathlib import Path

from kvturn.watched import FileFault, Watched, read_file


def read_engine_key(setting: str, file: Path) -> bytes:
    """Returns the Authorization header for the key that a file holds. Raises FileFault."""
    key = read_file(setting, file).strip()
    if not key.isascii() or not key.decode(errors="replace").isprintable() or not key:
        raise FileFault(f"{setting} {file}: must hold one API key")
    return b"Bearer " + key


class EngineKey:
    """The key of a file as it is now, or none."""

    def __init__(self, setting: str, file: Path | None) -> None:
        """Raises FileFault."""
        self._watched = (
            None if file is None else Watched((file,), lambda: read_engine_key(setting, file))
        )

    @property
    def authorization(self) -> bytes | None:
        """The Authorization header that engines get from the router, None for none of its own."""
        return None if self._watched is None else self._watched.value
