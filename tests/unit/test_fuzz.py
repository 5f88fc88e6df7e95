import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_gives_a_value_or_refuses_in_one_line(name):
    target = TARGETS[name]

    @settings(
        max_examples=16 // target.cost,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(value):
        target.check(value)

    check()
