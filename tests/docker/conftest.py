"""The compose stack in a Docker engine: images built once, kept under build/docker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from docker_engine import DockerEngine
from stack_images import images

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """The Docker engine of this machine, or one of the tests' own."""
    with DockerEngine() as running:
        yield running


@pytest.fixture(scope="session")
def image_names(engine: DockerEngine, pytestconfig: pytest.Config) -> dict[str, str]:
    """The image variables of .env, for images that are at hand; says what it makes, as it does."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return images(engine)
