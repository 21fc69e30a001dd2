"""TorchX components: what `torchx run pipelines/components.py:NAME` can launch.

They are given by file and not by an entry point: registering one would take TorchX's own components out of the whole
environment.
"""

import random
import socket
from typing import Any, Dict, List, Optional  # TorchX reads signatures and knows only these forms

import torchx.specs as specs
from torchx.components.dist import ddp

from fuxi_torchrec import __version__

# What every worker runs with; `.torchxconfig` gives plain dist.ddp the same.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

# Built by `docker build -t fuxi-torchrec:VERSION-cpu .`; clusters name their registry's copy with --image.
IMAGE = f"fuxi-torchrec:{__version__}-cpu"


def train(
    *overrides: str,
    config: str,
    run_dir: str,
    module: str = "pipelines.train",
    j: str = "1x2",
    image: str = IMAGE,
    name: str = "/",
    cpu: int = 2,
    gpu: int = 0,
    mem_mb: int = 8192,
    host: Optional[str] = None,
    threads: int = 1,
    restarts: int = 3,
    retries: int = 0,
    rdzv_port: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Train with torchrun on one or many hosts: dist.ddp with this project's settings.

    Args:
        overrides: key.sub=value settings that override the config's
        config: YAML file of the experiment, as the workers see it
        run_dir: directory of the run, on storage that all workers share
        module: Python module to run
        j: [min_nodes:]nodes x ranks per node, for example 1x2, 2x8 or 1:2x4
        image: container image for cluster schedulers, with the repository as working directory (see Dockerfile)
        name: job name, experiment/run
        cpu: cores per node
        gpu: GPUs per node
        mem_mb: memory per node in MB
        host: named resource; replaces cpu, gpu and mem_mb
        threads: OMP threads per rank
        restarts: how often torchrun restarts all workers when one fails
        retries: how often the scheduler restarts the whole job
        rdzv_port: rendezvous port of a job on several nodes; 0 takes a random free one, so that jobs on one host do
            not meet
        env: further environment variables of the workers
        mounts: mounts in TorchX's form, for example type=bind,src=/host,dst=/job
    """
    return group(
        "--config",
        config,
        "--run-dir",
        run_dir,
        *overrides,
        module=module,
        j=j,
        image=image,
        name=name,
        cpu=cpu,
        gpu=gpu,
        mem_mb=mem_mb,
        host=host,
        threads=threads,
        restarts=restarts,
        retries=retries,
        rdzv_port=rdzv_port,
        env=env,
        mounts=mounts,
    )


def group(
    *arguments: str,
    module: str,
    mem_mb: int = 8192,
    host: Optional[str] = None,
    threads: int = 1,
    restarts: int = 3,
    retries: int = 0,
    rdzv_port: int = 0,
    env: Optional[Dict[str, str]] = None,
    **settings: Any,
) -> specs.AppDef:
    """Run a module on a group of ranks: dist.ddp with this project's settings, which :func:`train` describes."""
    return ddp(
        *arguments,
        m=module,
        memMB=mem_mb,
        h=host,
        max_retries=retries,
        rdzv_port=rdzv_port or free_port(),
        env={**WORKER_ENV, "OMP_NUM_THREADS": str(threads), "PET_MAX_RESTARTS": str(restarts), **(env or {})},
        **settings,
    )


def single(
    *arguments: str,
    module: str,
    image: str = IMAGE,
    name: str = "",
    cpu: int = 2,
    mem_mb: int = 8192,
    host: Optional[str] = None,
    retries: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Run a module as one process, without torchrun.

    Args:
        arguments: of the module
        module: Python module to run
        image: container image for cluster schedulers, with the repository as working directory (see Dockerfile)
        name: job name; by default the module's
        cpu: cores
        mem_mb: memory in MB
        host: named resource; replaces cpu and mem_mb
        retries: how often the scheduler restarts the job
        env: environment variables
        mounts: mounts in TorchX's form, for example type=bind,src=/host,dst=/job
    """
    last = module.rpartition(".")[2]
    return specs.AppDef(
        name=name or last,
        roles=[
            specs.Role(
                name=last,
                image=image,
                entrypoint="python",
                args=["-m", module, *arguments],
                num_replicas=1,
                resource=specs.resource(cpu=cpu, gpu=0, memMB=mem_mb, h=host),
                env=dict(env or {}),
                max_retries=retries,
                mounts=specs.parse_mounts(mounts) if mounts else [],
            )
        ],
    )


def free_port(attempts: int = 50) -> int:
    """A random port below the ephemeral range that nothing on this host listens on now."""
    for _ in range(attempts):
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port found in {attempts} attempts; give one with --rdzv_port")
