"""Serve an export over HTTP.

python -m pipelines.serve --export DIR --port P [--host 127.0.0.1] [--token-file FILE | --token-env NAME]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuxi_torchrec.logging import get_logger, setup_logging
from fuxi_torchrec.options import add_encoder_option, add_options, check_least, option, options_from
from fuxi_torchrec.serving.options import Limits, RecommenderOptions
from fuxi_torchrec.serving.recommender import Recommender

logger = get_logger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerOptions:
    """What the server uses."""

    threads: int | None = option(None, "of the encoder and the search; torch's choice by default", least=1)
    max_connections: int = option(1024, "open at once; more are answered with 503", least=1)

    def __post_init__(self) -> None:
        check_least(self)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default; name another with care, and a token")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token-file", type=Path, help="file with the bearer token that callers must show")
    secret.add_argument("--token-env", metavar="NAME", help="environment variable with that token")
    for options in (RecommenderOptions, ServerOptions, Limits):
        add_options(parser, options)
    add_encoder_option(parser)
    return parser.parse_args(arguments)


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
        opening, server = options_from(args, RecommenderOptions), options_from(args, ServerOptions)
        limits = options_from(args, Limits)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    try:
        import torch
        import uvicorn

        from fuxi_torchrec.serving.http.service import create_app
    except ImportError as error:
        print(f'serve: {error.name} is not installed: pip install "fuxi_torchrec[serve]"', file=sys.stderr)
        return 1
    if server.threads is not None:
        torch.set_num_threads(server.threads)
    try:
        token = read_token(args)
        recommender = Recommender.load(args.export, **vars(opening))
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    if token is None and args.host not in LOOPBACK:
        logger.warning("anybody who reaches %s can read and forget users: give --token-file", args.host)
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
        limit_concurrency=server.max_connections,
        timeout_graceful_shutdown=10,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
