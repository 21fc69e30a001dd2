"""A tiny job for launch tests: joins the group, sums the ranks, says so; ``--fail RANK`` raises on one rank.

torchx run dist.ddp -j 1x2 -m integration_tests.hello_group
"""

import argparse
import time

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from fuxi_torchrec.config import load_config
from fuxi_torchrec.distributed import process_group, raise_on_all_ranks
from fuxi_torchrec.logging import get_logger, setup_logging


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config")
    parser.add_argument("--run-dir")
    parser.add_argument("--fail", type=int, help="the rank that raises")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    setup_logging(config.logging.level)
    with process_group(config.distributed.timeout_seconds, device_type="cpu") as world:
        try:
            with raise_on_all_ranks("the check"):
                if world.rank == args.fail:
                    raise ValueError(f"rank {world.rank} was told to fail")
        except Exception as error:
            get_logger("hello_group").error("%s: %s", type(error).__name__, error)
            torch.distributed.barrier()  # torchrun ends the others as soon as one has failed: all speak before
            if world.rank != args.fail:
                time.sleep(30)  # until it does
            raise
        total = torch.tensor(world.rank + 1)
        torch.distributed.all_reduce(total)
        message = "hello from %d processes of %d threads, sum %d, seed %d"
        get_logger("hello_group").info(message, world.size, torch.get_num_threads(), total, config.seed)


if __name__ == "__main__":
    main()
