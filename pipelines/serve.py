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
from fuxi_torchrec.options import add_encoder_option, add_options, check_bounds, option, options_from
from fuxi_torchrec.serving.http.connections import ConnectionLimits
from fuxi_torchrec.serving.options import Limits, RecommenderOptions

logger = get_logger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerOptions:
    """What the server uses."""

    host: str = option("127.0.0.1", "address to listen on; name another than loopback with care, and a token")
    port: int = option(8000, "to listen on; 0 takes a free one", least=0)
    threads: int | None = option(None, "of the encoder and the search; torch's choice by default", least=1)
    stop_seconds: int = option(10, "that requests have to finish at SIGTERM and Ctrl-C", least=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.port > 65535:
            raise ValueError(f"--port must be at most 65535, not {self.port}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, type=Path, metavar="DIR", help="what to serve; it is not changed")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token-file", type=Path, help="with the bearer token that callers must show; none by default")
    secret.add_argument("--token-env", metavar="NAME", help="environment variable with that token")
    for options in (ServerOptions, RecommenderOptions, Limits, ConnectionLimits):
        add_options(parser, options)
    add_encoder_option(parser)
    return parser.parse_args(arguments)


def read_token(args: argparse.Namespace) -> str | None:
    """The bearer token, never from the command line, where everybody on the machine can read it."""
    if args.token_file is not None:
        source = f"--token-file {args.token_file}"
        try:
            token = args.token_file.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from None
    elif args.token_env is not None:
        token, source = os.environ.get(args.token_env, "").strip().encode(), f"--token-env {args.token_env}"
    else:
        return None
    if not token:
        raise ValueError(f"{source} holds no token")
    if not all(33 <= character <= 126 for character in token):
        raise ValueError(f"{source}: a token is one line of visible ASCII characters, without spaces")
    return str(token.decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; SIGTERM and Ctrl-C let requests finish."""
    args = parse(arguments)
    setup_logging()
    try:
        from fuxi_torchrec.serving.http import server

        options, opening = options_from(args, ServerOptions), options_from(args, RecommenderOptions)
        limits, connections = options_from(args, Limits), server.within_open_files(options_from(args, ConnectionLimits))
        token, bound = read_token(args), server.bind(options.host, options.port)
        if token is None and options.host not in LOOPBACK:
            logger.warning("anybody who reaches %s can read and forget users: give --token-file", options.host)
        # what takes long to import comes after everything that can be wrong without it
        import torch

        from fuxi_torchrec.serving.http.service import create_app
        from fuxi_torchrec.serving.recommender import Recommender

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        recommender = Recommender.load(args.export, **vars(opening))
    except ImportError as error:
        print(f'serve: {error.name} is not installed: pip install "fuxi_torchrec[serve]"', file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    info = recommender.info()
    logger.info(
        "%s: %s users, %s items, as of %s", args.export, f"{info['users']:,}", f"{info['items']:,}", info["as_of"]
    )
    server.run(create_app(recommender, token, limits), bound, connections, options.stop_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
