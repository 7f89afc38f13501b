"""`python -m verl`: the same as the `verl` command."""

import sys

from verl.cli.main import main

sys.exit(main())
