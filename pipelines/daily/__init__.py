"""The production loop: a day's log to a published export, each stage a TorchX job.

    python -m pipelines.daily --config configs/daily.yaml [--scheduler local_cwd|slurm|kubernetes] [key=value ...]

prepare --extend, train --init-from, evaluate, gate, export, publish. A pipeline that failed or was killed goes on at
the stage where it stopped. Exit codes: 0 published or nothing to do, 1 a stage failed, 3 the gate rejected the day.
"""
