"""`torch_npu.optim`: the optimizer that transformers offers as `adamw_torch_npu_fused`."""

import torch


class NpuFusedAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, **group)
        return loss

    def _update(self, parameter, lr, betas, eps, weight_decay, amsgrad, **_) -> None:
        state = self.state[parameter]
        if not state:
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
            state.update(step=0, **{name: torch.zeros_like(parameter) for name in names})
        powers = [beta ** state["step"] for beta in betas]  # of the step before
        state["step"] += 1
        torch.ops.npu.npu_apply_adam_w(
            *powers,
            lr,
            weight_decay,
            *betas,
            eps,
            parameter.grad,
            state.get("max_exp_avg_sq"),
            amsgrad,
            False,
            out=(parameter, state["exp_avg"], state["exp_avg_sq"]),
        )
