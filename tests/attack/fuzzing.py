"""How hard the attacks try."""

from hypothesis import HealthCheck, settings

attack = settings(
    max_examples=1500,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
