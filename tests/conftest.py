"""What goes for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is: a timed assertion like any other, and there is none.
settings.register_profile("outfeed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outfeed")
