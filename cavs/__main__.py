"""Runs `cavs` as `python -m cavs`."""

import sys

from cavs.cli import main

sys.exit(main())
