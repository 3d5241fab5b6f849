"""`python -m polar_engine --model tiny`: the engine without the rest of the house."""

import sys

from polar_engine.app import run

run(sys.argv[1:])
