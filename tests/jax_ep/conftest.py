"""Closes each module's cached groups, so that memory and threads do not pile up."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest


@pytest.fixture(autouse=True, scope="module")
def _closed_groups() -> Iterator[None]:
    yield
    harness.close_groups()
