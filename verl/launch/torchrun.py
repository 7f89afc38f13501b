"""torchrun whose exit code tells a user's mistake from a failure: `python -m verl.launch.torchrun ARGUMENTS`.

torchrun itself exits with 1 whatever its ranks exited with. Here a mistake, which its rank has explained already in a
line, gives EXIT_CODE; any other failure gives 1 with torchrun's table of who failed first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from verl.errors import EXIT_CODE


def main(arguments: Sequence[str]) -> int:
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        # The ranks that a mistake of one has left without a peer fail too, or are ended by torchrun.
        if any(failure.exitcode == EXIT_CODE for failure in error.failures.values()):
            return EXIT_CODE
        sys.stderr.write(f"{error}\n")
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
