"""Whether tests that repeat the same thing at random repeat it for long: ``INRUN_LONG=1 make test-slow``."""

import os

LONG = os.environ.get("INRUN_LONG", "0") != "0"
