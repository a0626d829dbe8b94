"""The base of all optimizers: configuration, state, the step, and checkpoints.

A state tensor is fp32, or uint8 codes of a dynamic map with one fp32 absmax per block of 256 elements (Dettmers et
al. 2022, arXiv:2110.02861). Which one depends on `optim_bits`, on the size of the parameter and on overrides.
"""

from collections.abc import Callable, Iterable
from typing import Any
import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._sharding import is_sharded, local, local_blocks, zeros_per_block, zeros_stacked
from .. import functional as F
from .._ops.optim import STATE_ROWS
from ..errors import UnsupportedArgumentError, UnsupportedError
from ..formats import OPTIMIZER_BLOCKSIZE, num_blocks
from ..utils import sync_gpu  # noqa: F401  downstream replaces it here; a step itself waits for no device

#: Blocksize of 8-bit states written before 0.45; they are encoded anew when they are loaded.
OLD_BLOCKSIZE = 2048


def only(optimizer: object, **arguments: tuple[object, object]) -> None:
    """Raise unless each argument, given as `name=(value, supported)`, has the supported value."""
    for name, (value, supported) in arguments.items():
        if value != supported:
            raise UnsupportedArgumentError(
                f"{type(optimizer).__name__}: only {name}={supported} is supported, got {value}"
            )


class MockArgs:
    """Attributes from a dict: the part of the configuration that is not in the parameter groups."""

    def __init__(self, initial_data: dict[str, Any]):
        for key, value in initial_data.items():
            setattr(self, key, value)


class GlobalOptimManager:
    """Overrides an optimizer's configuration for single parameters; one instance, from `get_instance()`.

    Overrides belong to the parameter, not to a position, and disappear with it.
    """

    _instance = None

    def __init__(self):
        raise RuntimeError("Use GlobalOptimManager.get_instance()")

    def initialize(self) -> None:
        """Forget all overrides."""
        self.configs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.module_weight_config_triple: list[tuple[weakref.ref, str, dict[str, Any]]] = []
        self._registered: dict[tuple[int, int], tuple[torch.Size, dict[str, Any]]] = {}

    @classmethod
    def get_instance(cls) -> "GlobalOptimManager":
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def register_parameters(self, params: Iterable[Any]) -> None:
        """Carry overrides over to an optimizer that is built after its parameters move to another device.

        Needed only where a move makes new tensors (`p = p.to(device)`); `module.to(device)` keeps its parameters. The
        next optimizer that is built takes the overrides by position, from parameters of the same shape.

        Args:
            params: Parameters or parameter groups, in the order in which the optimizer gets them.
        """
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group_index, group in enumerate(groups):
            for index, p in enumerate(group["params"]):
                if p in self.configs:
                    self._registered[group_index, index] = (p.shape, self.configs[p])

    def adopt(self, param_groups: list[dict[str, Any]]) -> None:
        """Give a new optimizer's parameters what `register_parameters` recorded for their positions, once."""
        for (group_index, index), (shape, config) in self._registered.items():
            for p in param_groups[group_index]["params"][index : index + 1] if group_index < len(param_groups) else ():
                if p.shape == shape:
                    self.configs.setdefault(p, config)
        self._registered.clear()

    def override_config(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        key: str | None = None,
        value: Any = None,
        key_value_dict: dict[str, Any] | None = None,
    ) -> None:
        """Override configuration values for parameters, for every optimizer that holds them.

        Args:
            parameters: One parameter or several.
            key, value: One setting: a hyperparameter (`lr`, `betas`, `weight_decay`, ...) or `optim_bits`,
                `min_8bit_size`, `max_unorm`, `skip_zeros`. `optim_bits` acts until the first step.
            key_value_dict: Several settings, instead of `key` and `value`.

        Example:
            >>> manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
            >>> manager.override_config(model.embedding.weight, "optim_bits", 32)
        """
        if (key is None) == (key_value_dict is None):
            raise ValueError("override_config: give either key and value, or key_value_dict")
        settings = {key: value} if key_value_dict is None else key_value_dict
        for p in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            self.configs.setdefault(p, {}).update(settings)

    def register_module_override(self, module: torch.nn.Module, param_name: str, config: dict[str, Any]) -> None:
        """Override the configuration of `module.<param_name>`, looked up when an optimizer makes its first step."""
        if not hasattr(module, param_name):
            raise AttributeError(f"register_module_override: {type(module).__name__} has no '{param_name}'")
        alive = [triple for triple in self.module_weight_config_triple if triple[0]() is not None]
        self.module_weight_config_triple = [*alive, (weakref.ref(module), param_name, dict(config))]


class _Opaque:
    """Keeps tensors out of the reach of `torch.optim.Optimizer.load_state_dict`, which casts every tensor it sees."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors


def _decode(codes: torch.Tensor, absmax: torch.Tensor, qmap: torch.Tensor, blocksize: int) -> torch.Tensor:
    """fp32 values of an 8-bit state; stacked moments (absmax of two dimensions) have blocks of their own."""
    if absmax.dim() == 2:
        return torch.stack([_decode(c, a, qmap, blocksize) for c, a in zip(codes, absmax, strict=True)])
    return torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, qmap, blocksize, torch.float32)


def _encode(values: torch.Tensor, qmap: torch.Tensor, stacked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if stacked:
        codes, absmax = zip(*(_encode(v, qmap, False) for v in values), strict=True)
        return torch.stack(codes), torch.stack(absmax)
    return torch.ops.bitsandbytes.quantize_blockwise(values, qmap, OPTIMIZER_BLOCKSIZE)


class Optimizer8bit(torch.optim.Optimizer):
    """Base of all optimizers here, whatever the number of bits.

    Paged optimizers (`is_paged=True`) keep ordinary state on the parameter's device for now.

    Args:
        params: Parameters or parameter groups.
        defaults: Default hyperparameters of the groups.
        optim_bits: 8 or 32, the bits of a state element.
        is_paged: Whether state may be paged out to host memory.
    """

    _FSDP_WRAPPED_QUANT_STATE_KEY = "__bnb_optimizer_quant_state__"

    args: Any
    optimizer_name: str

    def __init__(self, params, defaults, optim_bits=32, is_paged=False):
        super().__init__(params, defaults)
        self.initialized = False
        self.is_paged = is_paged
        self.page_mng = F.GlobalPageManager.get_instance()
        self.mng = GlobalOptimManager.get_instance()
        self.mng.adopt(self.param_groups)
        self.non_castable_tensor_keys = {
            *("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "unorm_vec"),
            *("max1", "max2", "new_max1", "new_max2", "gnorm_vec"),  # of old checkpoints
        }
        self.name2qmap: dict[str, torch.Tensor] = {}
        if optim_bits == 8:
            self.fill_qmap()

    def _configure(self, optimizer_name: str, args: Any, **settings: Any) -> None:
        """Set what is not in the parameter groups, from `args` if given."""
        self.optimizer_name = optimizer_name
        self.args = MockArgs(settings) if args is None else args
        self._state_dtype(self.args.optim_bits)

    def fill_qmap(self) -> None:
        """Make the signed map of first moments and the unsigned map of second moments."""
        self.name2qmap["dynamic"] = F.create_dynamic_map(signed=True)
        self.name2qmap["udynamic"] = F.create_dynamic_map(signed=False)

    def _qmap(self, name: str, device: torch.device) -> torch.Tensor:
        """One map per device, shared by all states there."""
        if name not in self.name2qmap:
            self.fill_qmap()
        key = f"{name}:{device}"
        if key not in self.name2qmap:
            self.name2qmap[key] = self.name2qmap[name].to(device)
        return self.name2qmap[key]

    def __getstate__(self) -> dict[str, Any]:
        own = ("initialized", "is_paged", "non_castable_tensor_keys", "name2qmap", "args", "optimizer_name")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.page_mng = F.GlobalPageManager.get_instance()
        self.mng = GlobalOptimManager.get_instance()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state; each parameter's tensors are in one nested dict under `__bnb_optimizer_quant_state__`.

        FSDP gathers tensors that it finds beside `step` as if they had the parameter's shape; it leaves a dict alone.
        """
        result = super().state_dict()
        result["state"] = {key: self._wrapped(state, dict) for key, state in result["state"].items()}
        return result

    def _wrapped(self, state: Any, wrapper: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
        """A copy of one parameter's state with its tensors moved into `wrapper` under the key of the on-disk form."""
        if not isinstance(state, dict):
            return state
        state = dict(state)
        tensors = dict(state.pop(self._FSDP_WRAPPED_QUANT_STATE_KEY, {}))
        # In the order of the state, which is the same on all ranks: they gather the tensors one after the other.
        tensors.update({key: state.pop(key) for key in list(state) if key in self.non_castable_tensor_keys})
        return {**state, self._FSDP_WRAPPED_QUANT_STATE_KEY: wrapper(tensors)} if tensors else state

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load what `state_dict()` returned, from this package or an older one; dtypes stay as they are.

        8-bit states of the former blocksize are encoded anew.

        Args:
            state_dict: With the tensors wrapped as by `state_dict()`, or flat.
            move_to_device: Move state tensors to the device of their parameter.

        Raises:
            ValueError: If the parameter groups or the sizes of the states do not fit.
        """
        hidden = {key: self._wrapped(state, _Opaque) for key, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": hidden})
        copies: dict[tuple[int, torch.device], torch.Tensor] = {}  # maps that states shared stay shared
        for p, state in self.state.items():
            opaque = state.pop(self._FSDP_WRAPPED_QUANT_STATE_KEY, None) if isinstance(state, dict) else None
            if opaque is None:
                continue
            if torch.is_tensor(state.get("step")):
                state["step"] = int(state["step"])
            # Copies, so that training on does not change the loaded dict.
            for key, tensor in opaque.tensors.items():
                device = p.device if move_to_device and torch.is_tensor(p) else tensor.device
                copy = copies[id(tensor), device] if (id(tensor), device) in copies else tensor.to(device, copy=True)
                state[key] = copies.setdefault((id(tensor), device), copy) if key.startswith("qmap") else copy
            if torch.is_tensor(p):  # not state of a parameter that this optimizer does not have
                for suffix in ("1", "2"):
                    self._renew_blocks(p, state, suffix)

    @staticmethod
    def _renew_blocks(p: torch.Tensor, state: dict[str, Any], suffix: str) -> None:
        """Encode a state with blocks of the former size anew; refuse what has neither size."""
        codes, absmax = state.get("state" + suffix), state.get("absmax" + suffix)
        if codes is None or codes.dtype != torch.uint8 or is_sharded(codes):
            return
        n, blocks = p.numel(), -1 if absmax is None else absmax.shape[-1]
        if blocks == num_blocks(n, OPTIMIZER_BLOCKSIZE):
            return
        if absmax is None or blocks != num_blocks(n, OLD_BLOCKSIZE):
            raise ValueError(
                f"loaded 8-bit optimizer state: absmax{suffix} must have one value per block of {OPTIMIZER_BLOCKSIZE} "
                f"or {OLD_BLOCKSIZE} of the {n} elements, got {'none' if absmax is None else blocks}"
            )
        qmap = state["qmap" + suffix]
        values = _decode(codes, absmax, qmap, OLD_BLOCKSIZE)
        state["state" + suffix], state["absmax" + suffix] = _encode(values, qmap, stacked=absmax.dim() == 2)

    def to_gpu(self) -> None:
        """Move state to the device of its parameter (a model may have moved since it was made)."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                for key, value in state.items():
                    if torch.is_tensor(value) and value.device != p.device:
                        state[key] = value.to(p.device)

    def check_overrides(self) -> None:
        """Apply module overrides to the parameters of this optimizer."""
        own = {id(p) for group in self.param_groups for p in group["params"]}
        for reference, name, config in self.mng.module_weight_config_triple:
            parameter = getattr(reference(), name, None)
            if parameter is not None and id(parameter) in own:
                self.mng.override_config(parameter, key_value_dict=config)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if not self.initialized:
            # Only now: overrides may come after the optimizer, and modules may replace their parameters until here.
            self.check_overrides()
            self.to_gpu()
            self.initialized = True

        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                self.prefetch_state(p)
                self.update_step(group, p, gindex, pindex)
        return loss

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Settings of one parameter: its group's, `self.args`, then overrides."""
        config = {key: group[key] for key in ("betas", "eps", "weight_decay", "lr")}
        config |= {
            key: group.get(key, default) for key, default in (("alpha", 0.0), ("t_alpha", None), ("t_beta3", None))
        }
        config |= {key: getattr(self.args, key) for key in ("optim_bits", "min_8bit_size", "max_unorm", "skip_zeros")}
        config.update(self.mng.configs.get(group["params"][pindex], {}))
        return config

    @staticmethod
    def _state_dtype(optim_bits: int) -> torch.dtype:
        if optim_bits not in (8, 32):
            raise UnsupportedArgumentError(f"optim_bits must be 8 or 32, got {optim_bits}")
        return torch.uint8 if optim_bits == 8 else torch.float32

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the state of one parameter."""
        config = self.get_config(gindex, pindex, group)
        dtype = self._state_dtype(config["optim_bits"])
        if p.numel() < config["min_8bit_size"]:
            dtype = torch.float32

        state = self.state[p]
        state["step"] = 0
        rows_of_state1, rows_of_state2 = STATE_ROWS[self.optimizer_name]
        # The second of two states is a second moment: not negative.
        for i, rows, map_name in ((1, rows_of_state1, "dynamic"), (2, rows_of_state2, "udynamic")):
            if not rows:
                continue
            state[f"state{i}"] = (self.get_state_buffer if rows == 1 else self._get_state_double_buffer)(p, dtype)
            if dtype == torch.uint8:
                state[f"qmap{i}"] = self._qmap(map_name, p.device)
                state[f"absmax{i}"] = zeros_per_block(p, rows)
        if config["max_unorm"] > 0:
            state["unorm_vec"] = torch.zeros((1,), dtype=torch.float32, device=p.device)

    def _at_step(self, config: dict[str, Any], step: int) -> dict[str, Any]:
        """Settings at a step, for optimizers that schedule some of their own."""
        return config

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter and its state from its gradient."""
        state = self.state[p]
        state["step"] += 1
        config = self._at_step(self.get_config(gindex, pindex, group), state["step"])
        max_unorm = config["max_unorm"]
        if max_unorm > 0 and is_sharded(p):
            raise UnsupportedError(f"{type(self).__name__}: max_unorm needs whole parameters; this one is a DTensor")

        assert p.grad is not None
        grad, shard = local(p.grad), local(p)
        state1 = local(state["state1"])
        state2 = local(state["state2"]) if "state2" in state else None
        if state1.dtype == torch.float32:
            self._update_32bit(config, grad, shard, state, state1, state2)
            return

        absmax1 = local_blocks(state["absmax1"], p)
        absmax2 = None if state2 is None else local_blocks(state["absmax2"], p)
        if not max_unorm > 0:
            beta1, beta2, beta3 = (*config["betas"], 0.0)[:3]
            F.optimizer_update_8bit_blockwise(
                self.optimizer_name,
                grad,
                shard,
                state1,
                state2,
                beta1,
                beta2,
                beta3,
                config["alpha"],
                config["eps"],
                state["step"],
                config["lr"],
                state["qmap1"],
                state.get("qmap2"),
                absmax1,
                absmax2,
                config["weight_decay"],
                gnorm_scale=1.0,
                skip_zeros=config["skip_zeros"],
            )
            return

        # The 8-bit operator has no bound on the norm: decode, update in 32 bits, encode.
        eight_bit = [(state1, absmax1, state["qmap1"])]
        if state2 is not None and absmax2 is not None:
            eight_bit.append((state2, absmax2, state["qmap2"]))
        moments = [_decode(codes, absmax, qmap, OPTIMIZER_BLOCKSIZE) for codes, absmax, qmap in eight_bit]
        self._update_32bit(config, grad, shard, state, *moments)
        for (codes, absmax, qmap), values in zip(eight_bit, moments, strict=True):
            new_codes, new_absmax = _encode(values, qmap, stacked=absmax.dim() == 2)
            codes.copy_(new_codes)
            absmax.copy_(new_absmax)

    def _update_32bit(
        self,
        config: dict[str, Any],
        grad: torch.Tensor,
        p: torch.Tensor,
        state: dict[str, Any],
        state1: torch.Tensor,
        state2: torch.Tensor | None = None,
    ) -> None:
        beta1, beta2, beta3 = (*config["betas"], 0.0)[:3]
        F.optimizer_update_32bit(
            self.optimizer_name,
            grad,
            p,
            state1,
            beta1,
            config["eps"],
            state["step"],
            config["lr"],
            state2,
            beta2,
            beta3,
            config["alpha"],
            config["weight_decay"],
            gnorm_scale=1.0,
            unorm_vec=state.get("unorm_vec"),
            max_unorm=config["max_unorm"],
            skip_zeros=config["skip_zeros"],
        )

    def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros of the shape of `p`, on its device."""
        return zeros_stacked(p, 1, dtype)

    def _get_state_double_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros of shape `(2, *p.shape)`, on the device of `p`: two moments in one state."""
        return zeros_stacked(p, 2, dtype)

    def prefetch_state(self, p: torch.Tensor) -> None:
        """Bring the state of `p` to its device before it is needed; ordinary state is there already."""


def _checked_betas(lr: float, betas: Any, eps: float, weight_decay: float) -> Any:
    """Check the common hyperparameters; betas may be a string such as "(0.9, 0.999)"."""
    if isinstance(betas, str):
        betas = tuple(float(b) for b in betas.strip("() ").split(","))
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"Invalid {name}: must not be negative, got {value}")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid betas[{i}]: must be in [0, 1), got {beta}")
    return betas


class Optimizer2State(Optimizer8bit):
    """Base of optimizers that keep first and second moments (Adam, LAMB, AdEMAMix).

    Args:
        optimizer_name: `adam`, `lamb` or `ademamix`.
        params: Parameters or parameter groups.
        lr, betas, eps, weight_decay: Hyperparameters of the rule.
        optim_bits: 8 or 32, the bits of a state element.
        args: An object with attributes `optim_bits`, `min_8bit_size`, `max_unorm` and `skip_zeros`, used instead of
            the arguments of these names.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        max_unorm: If positive, the largest norm of an update's direction relative to the norm of the parameter.
        skip_zeros: Leave elements whose gradient is 0 unchanged.
        is_paged: Whether state may be paged out to host memory.
        alpha, t_alpha, t_beta3: Of AdEMAMix only.

    Raises:
        ValueError: For hyperparameters out of range.
        UnsupportedArgumentError: For `optim_bits` other than 8 and 32.
    """

    def __init__(
        self,
        optimizer_name,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        max_unorm=0.0,
        skip_zeros=False,
        is_paged=False,
        alpha=0.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
    ):
        betas = _checked_betas(lr, betas, eps, weight_decay)
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3
        )
        super().__init__(params, defaults, optim_bits, is_paged)
        self._configure(
            optimizer_name,
            args,
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            max_unorm=max_unorm,
            skip_zeros=skip_zeros,
        )


class Optimizer1State(Optimizer8bit):
    """Base of optimizers that keep one moment (momentum, LARS, RMSprop, Adagrad, Lion).

    Args:
        optimizer_name: `momentum`, `lars`, `rmsprop`, `adagrad` or `lion`.

    The others are those of `Optimizer2State`; the second beta is Lion's.
    """

    def __init__(
        self,
        optimizer_name,
        params,
        lr=1e-3,
        betas=(0.9, 0.0),
        eps=1e-8,
        weight_decay=0.0,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        max_unorm=0.0,
        skip_zeros=False,
        is_paged=False,
    ):
        betas = _checked_betas(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), optim_bits, is_paged)
        self._configure(
            optimizer_name,
            args,
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            max_unorm=max_unorm,
            skip_zeros=skip_zeros,
        )
