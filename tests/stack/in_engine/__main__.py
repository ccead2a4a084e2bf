"""Run by a vLLM environment's Python: the check files named, all in one process.

Most of the time goes to importing vLLM, so it is imported once. Each file runs as if it were the
program; what it prints, a failure with its traceback included, follows a line that names it.
"""

import runpy
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    files = sys.argv[1:]
    del sys.argv[1:]
    for file in files:
        print("file", file)
        try:
            runpy.run_path(str(Path(__file__).parent / file), run_name="__main__")
        except Exception:
            traceback.print_exc(file=sys.stdout)
