"""Serve an export over HTTP.

python -m pipelines.serve --export DIR --port P [--host 127.0.0.1] [--token-file FILE | --token-env NAME]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.logging import get_logger, setup_logging
from fuxi_torchrec.serving.recommender import MAX_RECENT, Recommender

logger = get_logger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default; name another with care, and a token")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token-file", type=Path, help="file with the bearer token that callers must show")
    secret.add_argument("--token-env", metavar="NAME", help="environment variable with that token")
    parser.add_argument("--log-dir", type=Path, help="of appended events; the export's path and .log by default")
    parser.add_argument("--verify", choices=("sizes", "checksums"), default="sizes")
    parser.add_argument("--search", choices=("index", "exact"), default="index")
    parser.add_argument("--cache-mib", type=int, default=512, help="memory for states of recent users")
    parser.add_argument(
        "--max-recent-events",
        type=int,
        default=MAX_RECENT,
        help="events since the export that are held in memory; beyond it, appending is 503 until a refresh",
    )
    parser.add_argument("--threads", type=int, help="of the encoder and the search; torch's choice by default")
    parser.add_argument("--max-k", type=int, default=1000, help="items of an answer")
    parser.add_argument("--max-body-kib", type=int, default=1024, help="size of a request")
    parser.add_argument("--max-events", type=int, default=10_000, help="events of a request")
    parser.add_argument("--max-connections", type=int, default=1024, help="open at once; more are answered with 503")
    parser.add_argument("--max-batch", type=int, default=64, help="requests worked on together")
    parser.add_argument("--batch-window-ms", type=float, default=2.0, help="how long a request waits for others")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """A ValueError if a number cannot be meant."""
    least = {"cache_mib": 0, "max_k": 1, "max_body_kib": 1, "max_events": 1, "max_batch": 1, "batch_window_ms": 0}
    least |= {"threads": 1, "max_recent_events": 1, "max_connections": 1}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not value >= smallest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, not {value}")


def read_token(args: argparse.Namespace) -> str | None:
    """The bearer token, never from the command line, where everybody on the machine can read it."""
    if args.token_file is not None:
        token = args.token_file.read_text().strip()
        source = str(args.token_file)
    elif args.token_env is not None:
        token = os.environ.get(args.token_env, "").strip()
        source = f"the environment variable {args.token_env}"
    else:
        return None
    if not token:
        raise ValueError(f"{source} holds no token")
    return str(token)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; SIGTERM and Ctrl-C let requests finish."""
    args = parse(arguments)
    setup_logging()
    try:
        check(args)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    try:
        import torch
        import uvicorn

        from fuxi_torchrec.serving.http.bodies import Limits
        from fuxi_torchrec.serving.http.service import create_app
    except ImportError as error:
        print(f'serve: {error.name} is not installed: pip install "fuxi_torchrec[serve]"', file=sys.stderr)
        return 1
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        token = read_token(args)
        recommender = Recommender.load(
            args.export,
            log_dir=args.log_dir,
            verify=args.verify,
            cache_mib=args.cache_mib,
            search=args.search,
            max_recent_events=args.max_recent_events,
        )
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    if token is None and args.host not in LOOPBACK:
        logger.warning("anybody who reaches %s can read and forget users: give --token-file", args.host)
    limits = Limits(
        k=args.max_k,
        body_bytes=args.max_body_kib * 1024,
        events=args.max_events,
        batch=args.max_batch,
        window_seconds=args.batch_window_ms / 1000,
    )
    info = recommender.info()
    logger.info(
        "%s: %s users, %s items, as of %s", args.export, f"{info['users']:,}", f"{info['items']:,}", info["as_of"]
    )
    app = create_app(recommender, token, limits)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        log_level="info",
        access_log=False,
        limit_concurrency=args.max_connections,
        timeout_graceful_shutdown=10,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
