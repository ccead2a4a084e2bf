"""Where `make setup` puts things, and where the command line writes its own."""

from pathlib import Path


def checkout() -> Path:
    """Returns the checkout this package runs from, or the current folder when it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "Makefile").is_file() else Path()


def current_folder_problem() -> str:
    """Returns what to say of a current folder from which nothing can be started, "" for none."""
    try:
        Path.cwd()
    except OSError:
        return "the current folder is gone; go to another one"
    return ""


def default_model() -> Path:
    """Returns the folder of the small model that setup builds."""
    return checkout() / "build" / "models" / "smollm2-135m-instruct"


def default_vllm_python(version: str = "0.29.0") -> Path:
    """Returns the interpreter of a vLLM environment that setup makes."""
    return checkout() / ".envs" / f"vllm-{version}" / "bin" / "python"


def default_run_dir() -> Path:
    """Returns the folder for logs, traces and the state of `kvturn up`."""
    return checkout() / "build" / "run"
