"""No test is timed: a busy machine is no defect. No module leaves its environment to the next one."""

import os

# Before torch is imported: a second thread costs more than it saves on models as small as those of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="module")
def environment():
    """Lightning and torch leave ranks and ports in the variables; a run started with them waits for its peers."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
