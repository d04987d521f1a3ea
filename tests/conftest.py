"""What holds for all tests: no time limit on an example, for the machine may be busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("draftmill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("draftmill")
