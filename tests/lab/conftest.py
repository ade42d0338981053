"""Tests of emulated hosts need root, `ip` and `tc`; without them they are skipped, and say why."""

import shutil

import pytest

from thinwire.lab import Lab, LabError, namespaces


@pytest.fixture(scope="session", autouse=True)
def lab_can_be_made():
    try:
        namespaces.require()
        if shutil.which("ip") is None:
            pytest.skip("no lab here: `ip` is not on the path of the tests")
        with Lab(hosts=1):
            pass
    except LabError as error:
        pytest.skip(f"no lab here: {error}")
