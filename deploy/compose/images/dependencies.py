"""Prints what projects need that is not of this checkout: dependencies.py pyproject.toml...

An image installs that first, in a layer that stays as it is while only the projects' code changes.
"""

import sys
import tomllib
from pathlib import Path

projects = [tomllib.loads(Path(name).read_text())["project"] for name in sys.argv[1:]]
needed = {text for project in projects for text in project["dependencies"]}
print("\n".join(sorted(text for text in needed if not text.startswith("kvturn"))))
