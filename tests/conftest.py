"""What holds for all tests: no time limit on an example, for the machine may be busy; Ctrl-C is heard.

The examples of a property test are the same on every run, so that a change fails for what it changed;
`make fuzz` looks for new ones.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "draftmill", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("fuzz", settings.get_profile("draftmill"), derandomize=False, max_examples=5000)
settings.load_profile("draftmill")

# A shell that starts us in the background has it ignored, which every process that we start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
