"""How parameters move: AdamW for everything, or row-wise Adagrad in the tables' backward pass and AdamW for the rest.

A step may consist of several micro-batches. TorchRec's pipelines call ``zero_grad`` and ``step`` around each; what
really happens, and when, is decided here.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuxi_torchrec.config import OptimizerConfig
from fuxi_torchrec.embeddings.pipeline import RowWiseAdagrad, ShardedModel
from fuxi_torchrec.embeddings.sharding import is_sharded, like_weight, table_states
from fuxi_torchrec.embeddings.tables import table_of
from fuxi_torchrec.encoders.base import ParameterGroups, SequenceEncoder
from fuxi_torchrec.training.feed import MicroBatch


def learning_rate_share(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of a step (0, 1, ...) over the configured one.

    Example:
        >>> config = OptimizerConfig(warmup_steps=2, lr_schedule="linear", decay_steps=6)
        >>> [learning_rate_share(config, step, 100) for step in range(8)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    end = config.decay_steps if config.decay_steps is not None else total_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * left


class StepOptimizer(torch.optim.Optimizer):
    """All optimizers of a run as one, for a pipeline that calls it around every micro-batch.

    ``current`` tells about the micro-batch on its way, and ``share`` of the learning rate is set before each step.
    """

    def __init__(self, model: ShardedModel, config: OptimizerConfig) -> None:
        self.config, self.model = config, model
        self.current: Callable[[], MicroBatch] | None = None  # None: every micro-batch is a step
        self.share = 1.0
        self.norm: Tensor | None = None  # of the last step's gradients, if they are clipped
        table_lr = config.lr if config.table_lr is None else config.table_lr
        tables = {n: p for n, p in model.named_parameters() if table_of(n) is not None and p.numel()}
        dense = {n: p for n, p in model.named_parameters() if table_of(n) is None}
        replicated = [n for n, value in table_states(model).items() if not is_sharded(value)]
        self._sharded = [p for n, p in tables.items() if n not in replicated]
        self._everywhere = [*(p for n, p in tables.items() if n in replicated), *dense.values()]
        scalar_lr = config.lr if config.scalar_lr is None else config.scalar_lr
        split = _dense_groups(model, list(dense.values()))
        groups = [
            {"params": split.matrices, "lr": config.lr, "weight_decay": config.weight_decay},
            {"params": split.tables, "lr": config.lr, "weight_decay": 0.0},
            {"params": split.scalars, "lr": scalar_lr, "weight_decay": 0.0},
        ]
        self.names = {id(p): n for n, p in {**tables, **dense}.items()}
        self._adagrad: RowWiseAdagrad | None = None
        self.fused: Any = None  # updates in the backward pass
        if config.kind == "adamw":
            groups.append({"params": list(tables.values()), "lr": table_lr, "weight_decay": 0.0})
        else:
            self.fused = model.fused_optimizer
            own = [p for n, p in tables.items() if n in replicated]  # data-parallel tables are never fused
            self._adagrad = RowWiseAdagrad(own, lr=table_lr, eps=config.eps) if own else None
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=config.betas, eps=config.eps, fused=True
        )
        self._all = [each for each in (self._adamw, self._adagrad, self.fused) if each is not None]
        self._rates = [(group, group["lr"]) for optimizer in self._all for group in optimizer.param_groups]
        super().__init__([{"params": list(dense.values())}], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before a micro-batch: forget gradients and set the learning rates, once a step."""
        if self.current is not None and not self.current().first:
            return
        for group, rate in self._rates:
            group["lr"] = rate * self.share
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """After a micro-batch: update, once a step."""
        if self.current is not None and not self.current().last:
            return
        if self.config.clip_norm is not None:
            self._clip(self.config.clip_norm)
        for optimizer in self._all:
            optimizer.step()

    @torch.no_grad()
    def _clip(self, largest: float) -> None:
        """Scale all gradients down to a norm: sharded tables' parts are summed over ranks, the rest is alike."""
        squares = _squares(self._sharded).to(self._everywhere[0].device)
        dist.all_reduce(squares)
        self.norm = (squares + _squares(self._everywhere)).sqrt()
        scale = (largest / (self.norm + 1e-6)).clamp(max=1.0)
        for parameter in (*self._sharded, *self._everywhere):
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    def moments(self) -> dict[str, Any]:
        """Every moment that an optimizer keeps, by name, sharded as its weight is.

        They alias the live values, so loading into them continues the run. Empty ones are made where there are none
        yet.
        """
        found: dict[str, Any] = {}
        weights = self.model.state_dict()
        local = {self.names[id(p)]: _adam_state(self._adamw, p) for p in _parameters(self._adamw)}
        if self.config.kind == "adamw":  # other ranks need to know of tables of which this one holds nothing
            local |= {name: {} for name in weights if table_of(name) is not None and name not in local}
        for name, values in local.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{kind}"] = like_weight(weights[name], values.get(kind))
        if self._adagrad is not None:
            for parameter in _parameters(self._adagrad):
                found[f"{self.names[id(parameter)]}.sum"] = self._adagrad.state[parameter]["sum"].view(-1)
        if self.fused is not None:
            for name, values in self.fused.state_dict()["state"].items():
                for value in values.values():
                    found[f"{name}.sum"] = value
        return found

    def set_steps(self, steps: int) -> None:
        """AdamW's count of steps, after loading."""
        for parameter in _parameters(self._adamw):
            self._adamw.state[parameter]["step"].fill_(steps)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _dense_groups(model: nn.Module, dense: list[nn.Parameter]) -> ParameterGroups:
    """As the encoder says of its own parameters, and by their shapes of all others."""
    own = [module.optimizer_groups() for module in model.modules() if isinstance(module, SequenceEncoder)]
    said = {id(parameter) for groups in own for group in groups for parameter in group}
    rest = ParameterGroups.by_shape([parameter for parameter in dense if id(parameter) not in said])
    return ParameterGroups(*([p for groups in (*own, rest) for p in groups[n]] for n in range(3)))


def _adam_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW makes its moments at the first step; for loading they must be there before."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = torch.zeros_like(parameter)
    return state


def _squares(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(gradients)).square().sum()
