"""A small model and its data, for the tests of each file in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import sums, write_dataset, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), sums(100))
