"""A CUDA device that is not there: tensors that say they are on ``cuda:0`` and keep their numbers on the CPU.

    with Device() as device:
        encoder = device.moved(encoder)
        encoder(device.put(x), offsets, ...)
    device.launches, device.syncs, device.copies      # where they came from, as "file:line", one entry each

A tensor of the device and one of the host in one operation raise, as on a GPU; a scalar of the host may take part. What
makes the host wait for the device is a sync: reading a number, copying to the host, and operations whose result has a
size that only the device knows. Kernels of Triton count as one launch each; with ``numbers`` its interpreter runs them.
Autograd runs its own threads for real GPUs; to it these tensors are of the device type "lazy".
"""

import copy
import sys
from contextlib import ExitStack
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fuxi_torchrec.ops import triton

CUDA = torch.device("cuda", 0)
_NO_LAUNCH = {"detach", "alias", "_unsafe_view", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided"}
# the size of the result depends on numbers: the host has to wait for it
_SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}


class MixedDevicesError(RuntimeError):
    """A tensor of the host met one of the device."""


class Pretend(torch.Tensor):
    """A tensor of the device."""

    inner: torch.Tensor
    owner: "Device"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, owner):
        assert not isinstance(inner, Pretend)
        made = torch.Tensor._make_wrapper_subclass(
            *(cls, inner.shape, inner.stride(), inner.storage_offset()), dtype=inner.dtype, device="lazy"
        )
        made.inner, made.owner = inner.detach(), owner
        return made

    def __repr__(self):
        return f"Pretend({self.inner})"

    @property
    def device(self):
        return CUDA

    @property
    def is_cuda(self):
        return True

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        owner = next(x.owner for x in tree_leaves((args, kwargs)) if isinstance(x, Pretend))
        return owner.dispatch(func, args, kwargs or {})


def _place():
    """The line of the package that asked for it."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/fuxi_torchrec/" in name and "/tests/" not in name:
            return f"{name.rpartition('/fuxi_torchrec/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Device(TorchFunctionMode):
    """While entered, ``cuda`` is this device."""

    def __init__(self, numbers=True, capability=(8, 0)):
        super().__init__()
        self.numbers, self.capability = numbers, capability
        self.launches, self.syncs, self.copies, self.kernels = [], [], [], []
        self._stack = ExitStack()

    def __enter__(self):
        self._stack.enter_context(mock.patch.object(triton, "capability", return_value=self.capability))
        if not triton.load().missing:
            from fuxi_torchrec.ops.triton import launch

            self._stack.enter_context(mock.patch.object(launch, "run", self._run_kernel))
        return super().__enter__()

    def __exit__(self, *problem):
        self._stack.close()
        return super().__exit__(*problem)

    def forget(self):
        """Count from here."""
        for counted in (self.launches, self.syncs, self.copies, self.kernels):
            counted.clear()

    def put(self, x):
        """A tensor on the device; a copy that is not counted."""
        with torch._C.DisableTorchFunction():
            return Pretend(x.detach().clone(), self).requires_grad_(x.requires_grad)

    def moved(self, module):
        """A copy of a module whose parameters and buffers are on the device."""
        module = copy.deepcopy(module)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = torch.nn.Parameter(self.put(parameter.detach()), parameter.requires_grad)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = self.put(buffer)
        return module

    # --- functions that name a device, or leave it -------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        there = bool(args) and isinstance(args[0], Pretend)
        if name in ("tolist", "numpy") and there:
            self.syncs.append(_place())
            return getattr(args[0].inner, name)()
        if name in ("to", "cuda", "cpu"):
            return self._to(name, args, kwargs)
        device = kwargs.get("device")
        if name == "as_tensor" and there:
            return args[0]
        if name == "__setitem__" and there:
            return func(args[0], args[1], self._there(args[2], args[0].dtype))
        if name == "where" and any(isinstance(x, Pretend) for x in args):
            return self._where(func, args)
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "cpu"})
        if name in ("tensor", "as_tensor"):  # of numbers of the host: a copy that waits for nothing, but is not pinned
            self.copies.append(_place())
            self.syncs.append(_place())
        elif name not in _NO_LAUNCH:
            self.launches.append(_place())
        return Pretend(made, self)

    def _where(self, func, args):
        """A number among the choices becomes a tensor of the device first, as on a GPU."""
        dtype = next(x.dtype for x in args if isinstance(x, torch.Tensor) and x.dtype != torch.bool)
        return func(*(self._there(x, dtype) for x in args))

    def _there(self, x, dtype):
        if isinstance(x, torch.Tensor):
            return x
        self.launches.append(_place())
        return Pretend(torch.tensor(x, dtype=dtype), self)

    def _to(self, name, args, kwargs):
        tensor, *rest = args
        wanted = {"cuda": CUDA, "cpu": torch.device("cpu")}.get(name)
        others, dtype = [], kwargs.get("dtype")
        for argument in (*rest, *([kwargs["device"]] if "device" in kwargs else [])):
            if isinstance(argument, str | torch.device):
                wanted = torch.device(argument)
            elif isinstance(argument, torch.Tensor):
                wanted, dtype = argument.device, argument.dtype
            elif isinstance(argument, torch.dtype):
                dtype = argument
            else:
                others.append(argument)
        here = tensor.device
        keywords = {"copy": kwargs["copy"]} if "copy" in kwargs else {}
        if wanted is None or wanted.type == here.type:
            return tensor.to(dtype or tensor.dtype, **keywords)
        self.copies.append(_place())
        if wanted.type == "cuda":
            return _Arrive.apply(tensor.to(dtype or tensor.dtype), self)
        self.syncs.append(_place())
        return _Leave.apply(tensor).to(dtype or tensor.dtype)

    # --- operations --------------------------------------------------------------------------------------------------

    def dispatch(self, func, args, kwargs):
        name = func._schema.name.partition("::")[2]
        leaves = tree_leaves((args, kwargs))
        for x in leaves:
            if isinstance(x, torch.Tensor) and not isinstance(x, Pretend) and x.dim():
                raise MixedDevicesError(f"{name} at {_place()}: a tensor of the host among those of {CUDA}")
        if name.startswith("triton_"):
            from fuxi_torchrec.ops.triton import operators

            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)):
                return operators.IMPLEMENTATIONS[name](*args)
        self._count(func, name, args, kwargs)
        given = {id(x.inner): x for x in leaves if isinstance(x, Pretend)}
        inside = tree_map(lambda x: x.inner if isinstance(x, Pretend) else x, (args, self._here(kwargs)))
        found = func(*inside[0], **inside[1])

        def outside(x):
            if not isinstance(x, torch.Tensor):
                return x
            return given[id(x)] if id(x) in given else Pretend(x, self)

        if name == "_local_scalar_dense":
            return found
        return tree_map(outside, found)

    @staticmethod
    def _here(kwargs):
        return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs

    def _count(self, func, name, args, kwargs):
        place = _place()
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in _NO_LAUNCH:
            self.launches.append(place)
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, Pretend) and x.dtype == torch.bool]
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and bool(masks)
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _SIZED_BY_NUMBERS or name == "_local_scalar_dense" or by_mask or unsized:
            self.syncs.append(place)

    def _run_kernel(self, kernel, grid, arguments, options):
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        for x in arguments:
            if isinstance(x, torch.Tensor) and not isinstance(x, Pretend):
                raise MixedDevicesError(f"kernel {name} at {_place()}: a tensor of the host")
        self.launches.append(_place())
        self.kernels.append(name)
        if self.numbers:
            kernel[grid](*(x.inner if isinstance(x, Pretend) else x for x in arguments), **options)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return Pretend(x, owner)

    @staticmethod
    def backward(ctx, grad):
        return grad.inner, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.owner = x.owner
        return x.inner.clone()

    @staticmethod
    def backward(ctx, grad):
        return Pretend(grad, ctx.owner)
