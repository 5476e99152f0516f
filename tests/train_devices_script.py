"""Run by `test_train_devices`: one of two processes of `cavs train --distributed`, with two devices each.

Arguments: the number of the process, the port of process 0, whether process 1 "dies" after the first epoch, and the options of
`cavs train`.
"""

import os
import signal
import sys

import cavs
from cavs import cli
from cavs.recipes import _command


def main() -> None:
    number, port, dies, *options = sys.argv[1:]
    score = cavs.data.Keeper.score

    def score_and_die(self, *args, **more):
        score(self, *args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    _command.HEARTBEAT = 5  # seconds until process 0 learns it
    if dies == "dies" and number == "1":
        cavs.data.Keeper.score = score_and_die
    sys.exit(cli.main(["train", *options, "--distributed", f"127.0.0.1:{port},2,{number}"]))


if __name__ == "__main__":
    main()
